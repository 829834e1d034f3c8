"""``gpufaas run``: one file as a function, for one call."""

import contextlib
import secrets
from pathlib import Path

import click

from gpufaas import UnknownFunction
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

    Its answer is on stdout, and what it printed on stderr. What the file says of itself: 'gpufaas deploy --help'.

    Examples:
      gpufaas run handler.py -d hello
      gpufaas run sentiment.py --timing < review.txt
      gpufaas run handler.py -d '{"n": 3}' --content-type application/json -e LOG=debug
      gpufaas run handler.py -d hello --json | jq .phases
    """
    name = f"{one_file.name_of(file)[:50]}-{secrets.token_hex(4)}".lstrip("-")
    stack, functions = one_file.read(file, name)
    steps, url = pipeline.Steps(push=True, deploy=True), flags.gateway_url(gateway)
    with flags.connect(url) as client:
        try:
            pipeline.run(stack, functions, steps, client, overrides=overrides, quiet=True)
            ctx.invoke(
                invoke.command, name=name, data=data, content_type=content_type, timing=timing, headers=[], query=[],
                namespace=overrides.namespace, gateway=url, as_json=as_json,
            )  # fmt: skip
        finally:
            with contextlib.suppress(UnknownFunction), client.logs(name, overrides.namespace) as lines:
                for line in lines:
                    output.note(line["text"].rstrip("\n"))
            client.remove(name, overrides.namespace)
            for folder in (stack.folder / name, stack.folder / "build" / name):
                remove_tree(folder)
