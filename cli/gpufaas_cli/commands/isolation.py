"""``gpufaas isolation``: what keeps functions apart on this machine (`gpufaas_apps.doctor` tries it)."""

import click

from gpufaas_cli import declare, output


@declare.group("isolation")
def command() -> None:
    """
    What keeps functions that are processes from each other, and from the platform.

    Examples:
      gpufaas isolation check
    """


@command.command("check")
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
