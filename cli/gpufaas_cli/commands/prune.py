"""``gpufaas prune``: what can go, at the gateway and in the build folder here."""

from pathlib import Path

from gpufaas import Client
from gpufaas_cli import declare, flags, output
from gpufaas_cli.stack import find_stack
from gpufaas_core.files import remove_tree
from gpufaas_core.units import format_bytes


@declare.command("prune")
@flags.yes
@flags.client
def command(yes: bool, client: Client) -> None:
    """
    Remove what nothing needs any more: at the gateway, bundles and weights that no function names; beside the stack
    file here, what was built of functions that it does not name. Says what and how much, and asks first.

    Examples:
      gpufaas prune
      gpufaas prune --yes -g http://gateway:8080
    """
    with flags.refused_as(
        {404: f"{client.shown} is a gateway of a cluster, or older: only gpufaas serve prunes what it keeps"}
    ):
        there = client.prune(dry=True)
    old: list[Path] = []
    if find_stack():
        stack, functions = flags.Selection().read()
        built = {each.parent for each in (stack.folder / "build").glob("*/.gpufaas-build.json")}
        old = sorted(built - {stack.folder / "build" / each.name for each in functions})
    output.show(f"{client.shown}: {there['artifacts']} artifacts, {format_bytes(there['size'])}")
    for each in old:
        size = sum(file.lstat().st_size for file in each.rglob("*"))
        output.show(f"{each}: {format_bytes(size)}")
    if not (there["artifacts"] or old):
        return
    flags.confirm("Remove these?", yes)
    gone = client.prune()
    for each in old:
        remove_tree(each)
    output.show(f"Removed: {gone['artifacts']} artifacts, {format_bytes(gone['size'])}; {len(old)} builds.")
