"""What this machine gives to a platform: ``gpufaas doctor`` and ``isolation`` (`gpufaas_apps.doctor` tries it)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from gpufaas_cli import declare, flags, output
from gpufaas_cli.cluster_flags import data_folder, data_option

ANSWERS_S = 10.0


def _show(found: Sequence[Any]) -> None:
    for each in found:
        mark = {True: "✓", False: "✗", None: "-"}[each.works]
        mend = "" if each.works or not each.mend else f"  → {each.mend}"
        output.show(f"{mark} {each.name:<21}{each.found}{mend}".rstrip())


@declare.command("doctor")
@data_option("functions, weights and logs")
@flags.gateway_only
@declare.shows(_show, fails=lambda found: any(each.works is False for each in found))
def doctor(data: Path | None, gateway: str | None) -> Sequence[Any]:
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
    return [*examined(data_folder({"data": data}), port), ready]


@declare.group("isolation")
def isolation() -> None:
    """
    What keeps functions that are processes from each other, and from the platform.

    Examples:
      gpufaas isolation check
    """


def _show_mechanisms(found: Sequence[Any]) -> None:
    rows = [(each.name, "yes" if each.works else "no", "strict" * each.needed, each.why) for each in found]
    output.table(("Mechanism", "Works", "Needed by", "Note"), rows)


@isolation.command("check")
@declare.shows(_show_mechanisms, fails=lambda found: any(each.needed and not each.works for each in found))
def check() -> Sequence[Any]:
    """
    Try each mechanism on this machine, as this user. Exits 1 where serve --isolation strict would not start.

    Examples:
      gpufaas isolation check
      gpufaas isolation check --json
    """
    with declare.needing("isolation check", "node"):
        from gpufaas_apps.doctor import tried
    return tried()[1]
