"""``gpufaas completion``: click knows how."""

import click

from gpufaas_cli import declare, output


@declare.command("completion")
@click.option("--shell", type=click.Choice(["bash", "zsh", "fish"]), required=True, help="The shell that you use.")
def command(shell: str) -> None:
    """
    Write a script to stdout that completes commands and options in your shell.

    Examples:
      gpufaas completion --shell bash > ~/.local/share/bash-completion/completions/gpufaas
      source <(gpufaas completion --shell zsh)
      gpufaas completion --shell fish > ~/.config/fish/completions/gpufaas.fish
    """
    from click.shell_completion import get_completion_class

    from gpufaas_cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    # Not .source(): it starts bash to learn its version, of a machine that may not be the one where this is used.
    complete = found(cli, {}, "gpufaas", "_GPUFAAS_COMPLETE")
    output.show(complete.source_template % complete.source_vars())
