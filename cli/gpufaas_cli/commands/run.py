"""``gpufaas run``: one file as a function, for one call."""

import contextlib
import dataclasses
import secrets
import signal
from pathlib import Path
from typing import Any

import click

from gpufaas import Answer, UnknownFunction
from gpufaas_cli import build_flags, declare, flags, one_file, output, pipeline
from gpufaas_cli.commands import invoke
from gpufaas_core.files import remove_tree


@declare.command("run")
@click.argument("file", metavar="FILE.py", type=click.Path(path_type=Path))
@click.option("-d", "--data", metavar="TEXT", help="Body, instead of stdin.")
@click.option("--content-type", default="text/plain", show_default=True, metavar="TYPE")
@click.option("--timing", is_flag=True, help="Show on stderr the device, and the time of each phase.")
@declare.gathered("overrides", pipeline.Overrides, build_flags.env, build_flags.annotation, build_flags.secret,
                  flags.namespace)  # fmt: skip
@flags.gateway
@declare.as_json
@click.pass_context
def command(
    ctx: click.Context, file: Path, data: str | None, content_type: str, timing: bool, overrides: pipeline.Overrides,
    gateway: str | None, as_json: bool,
) -> None:  # fmt: skip
    """
    Deploy FILE.py under a random name, call it once, show its answer, and remove it, on Ctrl-C as well.

    Its answer is on stdout, and what it printed on stderr; with --json, both are in one object, with the timing. What
    the file says of itself: 'gpufaas deploy --help'.

    Examples:
      gpufaas run handler.py -d hello
      gpufaas run sentiment.py --timing < review.txt
      gpufaas run handler.py -d '{"n": 3}' --content-type application/json -e LOG=debug
      gpufaas run handler.py -d hello --json | jq .phases
    """
    name = f"{one_file.name_of(file)[:50].strip('-')}-{secrets.token_hex(4)}"
    stack, functions = one_file.read(file, name)
    steps, url = pipeline.Steps(push=True, deploy=True), flags.gateway_url(gateway)
    found: dict[str, Any] = {}
    printed: list[str] = []
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    with flags.connect(url) as client:
        try:
            pipeline.run(stack, functions, steps, client, overrides=overrides, quiet=True)
            if as_json:
                typed = {"Content-Type": content_type}
                answer = client.invoke(name, invoke.body_of(data)[0], namespace=overrides.namespace, headers=typed)
                found = {"status": answer.status, "answer": _value(answer), **dataclasses.asdict(answer.timing)}
            else:
                ctx.invoke(
                    invoke.command, name=name, data=data, content_type=content_type, timing=timing, headers=[],
                    query=[], namespace=overrides.namespace, gateway=url,
                )  # fmt: skip
        finally:
            with contextlib.suppress(UnknownFunction), client.logs(name, overrides.namespace) as lines:
                printed += (line["text"].rstrip("\n") for line in lines)
            client.remove(name, overrides.namespace)
            for folder in (stack.folder / name, stack.folder / "build" / name):
                remove_tree(folder)
            for text in () if found else printed:
                output.note(text)
    if as_json:
        output.show_json({**found, "printed": printed})
        ctx.exit(int(found["status"] >= invoke.FAILS))


def _value(answer: Answer) -> Any:
    """Return the body as JSON, if it is, else as text."""
    try:
        return answer.json()
    except ValueError:
        return answer.text
