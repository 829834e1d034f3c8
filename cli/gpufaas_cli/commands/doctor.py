"""What this machine gives to a platform: ``gpufaas doctor`` and ``isolation`` (`gpufaas_apps.doctor` tries it)."""

from pathlib import Path

import click
import httpx

from gpufaas_cli import declare, flags, output
from gpufaas_cli.cluster_flags import data_folder, data_option

ANSWERS_S = 10.0


@declare.command("doctor")
@data_option("functions, weights and logs")
@flags.gateway_only
@declare.as_json
@click.pass_context
def doctor(ctx: click.Context, /, data: Path | None, gateway: str | None, as_json: bool) -> None:
    """
    Check this machine, part by part, and the gateway, and say what mends them. Exits 1 where something fails (✗) that
    is needed; what is absent (-) is not.

    Examples:
      gpufaas doctor
      gpufaas doctor -g http://gateway:8080
      gpufaas doctor --json | jq '.[] | select(.works == false)'
    """
    with declare.needing("doctor", "serve"):
        from gpufaas_apps.doctor import Check, examined
    url, port = httpx.URL(flags.gateway_url(gateway)).copy_with(userinfo=b""), None
    try:
        answer = httpx.get(f"{url}/readyz", timeout=ANSWERS_S)
        said = "; ".join(answer.text.split("\n")).strip("; ")
        ready = Check("gateway", answer.is_success, f"{url}: {said}", "gpufaas top")
    except httpx.HTTPError as exc:
        ready = Check("gateway", False if gateway else None, f"{url}: {exc}", "gpufaas serve")
        port = url.port or 8080
    found = [*examined(data_folder({"data": data}), port), ready]
    if as_json:
        output.show_json(found)
    for each in () if as_json else found:
        mark = {True: "✓", False: "✗", None: "-"}[each.works]
        mend = "" if each.works or not each.mend else f"  → {each.mend}"
        output.show(f"{mark} {each.name:<21}{each.found}{mend}".rstrip())
    ctx.exit(int(any(each.works is False for each in found)))


@declare.group("isolation")
def isolation() -> None:
    """
    What keeps functions that are processes from each other, and from the platform.

    Examples:
      gpufaas isolation check
    """


@isolation.command("check")
@declare.as_json
@click.pass_context
def check(ctx: click.Context, /, as_json: bool) -> None:
    """
    Try each mechanism on this machine, as this user. Exits 1 where serve --isolation strict would not start.

    Examples:
      gpufaas isolation check
      gpufaas isolation check --json
    """
    with declare.needing("isolation check", "node"):
        from gpufaas_apps.doctor import tried
    _, found = tried()
    if as_json:
        output.show_json(found)
    else:
        rows = [(each.name, "yes" if each.works else "no", "strict" * each.needed, each.why) for each in found]
        output.table(("Mechanism", "Works", "Needed by", "Note"), rows)
    ctx.exit(int(any(each.needed and not each.works for each in found)))
