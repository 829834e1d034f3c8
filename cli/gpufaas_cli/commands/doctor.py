"""``gpufaas doctor``: what serves functions on this machine, and what keeps it from that (`gpufaas_apps.doctor`)."""

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
def command(ctx: click.Context, /, data: Path | None, gateway: str | None, as_json: bool) -> None:
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
