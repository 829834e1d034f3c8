"""``gpufaas policies``: what --policy can name."""

from gpufaas_cli import declare, output
from gpufaas_scheduler.policies.registry import Described, described
from gpufaas_scheduler.policies.spec import EXAMPLE, FORM


def _show(found: list[Described]) -> None:
    output.show(f"--policy {FORM}\nas in {EXAMPLE}\n")
    for each in found:
        output.show(f"{each.role + '=' if each.role else ''}{each.name}: {each.says}")
        for name, allowed, default, means in each.options:
            output.show(f"  {name}={default}  {means} ({allowed})")


@declare.command("policies")
@declare.shows(_show)
def command() -> list[Described]:
    """
    List the policies that --policy can name, what can fill a role beside them, and the options of each.

    Examples:
      gpufaas policies
      gpufaas policies --json
      gpufaas serve --policy lalb-o3:o3_limit=10+replacement=cost-aware
    """
    return described()
