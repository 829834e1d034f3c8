"""``gpufaas remove``: functions, by name or those of the stack file; ``prune``: what no function needs any more."""

from pathlib import Path

import click

from gpufaas import DEFAULT_NAMESPACE, Client, Refused
from gpufaas_cli import declare, flags, output
from gpufaas_cli.stack import choose_gateway, find_stack
from gpufaas_core.errors import GpufaasError
from gpufaas_core.files import remove_tree
from gpufaas_core.units import format_bytes


@declare.command("remove")
@flags.stack
@click.option("--all", "every", is_flag=True, help="Remove every function of the namespace.")
@flags.yes
@flags.namespace
@flags.gateway
def remove(
    selection: flags.Selection, every: bool, yes: bool, namespace: str | None, gateway: str | None
) -> None:  # fmt: skip
    """
    Remove functions from the gateway: the named ones, else the stack file's. One that is not deployed is no error.
    With --all, those of the namespace, whatever deployed them; it asks first.

    Examples:
      gpufaas remove digits
      gpufaas remove                      everything that stack.yaml names
      gpufaas remove -f other.yaml --filter 'cnn-*'
      gpufaas remove --all -n dev --yes
    """
    if every:
        if selection.names or selection.glob or selection.regex:
            raise click.UsageError("--all removes every function: give no names and no filter beside it")
        url = flags.gateway_url(gateway, selection.yaml_file)
        with flags.connect(url) as client:
            targets = [(each["name"], namespace) for each in client.functions(namespace)]
        named = ", ".join(name for name, _ in targets)
        flags.confirm(f"Remove {len(targets)} of {namespace or DEFAULT_NAMESPACE}: {named}?", yes or not targets)
    elif selection.names and (selection.yaml_file, selection.glob, selection.regex) == (None, None, None):
        # A name may be that of any function, not only of one in the stack file here.
        targets = [(name, namespace) for name in selection.names]
        url = flags.gateway_url(gateway)
    else:
        stack, functions = selection.read()
        targets = [(each.name, namespace or each.namespace) for each in functions]
        url = choose_gateway(gateway, stack.gateway)
    failed: list[str] = []
    with flags.connect(url) as client:
        for name, where in targets:
            output.show(f"Deleting: {name}.{where or ''}")
            try:
                removed = client.remove(name, where)
            except Refused as exc:
                output.note(f"gpufaas: {name}: {exc}")
                failed.append(name)
                continue
            output.show("Removing old function." if removed else "No existing function to remove.")
    if failed:
        raise GpufaasError(f"{len(failed)} of {len(targets)} functions not removed: {', '.join(failed)}")


@declare.command("prune")
@flags.yes
@flags.client
def prune(yes: bool, client: Client) -> None:
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
