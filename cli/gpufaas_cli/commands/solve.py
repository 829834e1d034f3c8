"""``gpufaas solve``: what published systems would decide, for a problem in JSON; no gateway and no history is asked."""

import importlib
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple

import click
import msgspec

from gpufaas_cli import declare, output


class _Solver(NamedTuple):
    help: str
    options: tuple[click.Option, ...] = ()
    """The options that `solve` gets by name."""


_POLICIES: Final = ("igniter", "usher", "wao-usher", "ao-milp", "wsm-milp", "qa-milp", "ia-greedy")


def _limit(default: str) -> click.Option:
    return click.Option(
        ["--time-limit"], type=click.FloatRange(0, min_open=True), metavar="SECONDS",
        help=f"Answer after so long at the latest, with how far from the best it may be. [default: {default}]",
    )  # fmt: skip


_POLICY: Final = click.Option(
    ["--policy"], type=click.Choice(_POLICIES), default="qa-milp", show_default=True, help="How models are placed."
)
_SOLVERS: Final[Mapping[str, _Solver]] = {
    "hardware": _Solver("Choose the cheapest node type that serves a burst in time (PALDIA)."),
    "variants": _Solver(
        "Load and unload variants so that a load is served cheapest (INFaaS).",
        (_limit("until it is proven"),),
    ),
    "select": _Solver("Choose the variant and the worker that answer a query (INFaaS)."),
    "partition": _Solver("Cut a model into parts that load at once and serve as a pipeline (Flashpoint)."),
    "compute": _Solver(
        "Place models on devices, with batches and shares (iGniter, Usher, programmes).",
        (_POLICY, _limit("60, of integer programmes")),
    ),
    "size": _Solver(
        "Find the fewest or cheapest devices on which a policy serves everything.",
        (_POLICY, _limit("60, of each placement that is tried")),
    ),
}

_READS: Final = "The problem is JSON, from FILE or from stdin (-)."
_EXAMPLES: Final = """
\b
Examples:
  gpufaas solve {0} problem.json               a table
  gpufaas solve {0} problem.json --explain     and the working in words
  gpufaas solve {0} - --json < problem.json    for machines

\b
The same problem gives the same answer. A problem without a solution is answered, too, and ends with 0; one that
cannot be read ends with 2. docs/planning.md has each problem's keys.
"""


@click.group(
    "solve",
    no_args_is_help=True,
    short_help="Ask what published systems would decide.",
    epilog=_EXAMPLES.format("hardware"),
)
def command() -> None:
    """Ask what published systems would decide; no gateway is asked."""


def _make(name: str, solver: _Solver) -> click.Command:
    @declare.as_json
    def run(file: BinaryIO, as_json: bool, explain: bool, **options: Any) -> None:
        from gpufaas_scheduler.plans import PLANS, problem

        module = importlib.import_module(f"gpufaas_scheduler.plans.{PLANS[name]}")
        of = getattr(file, "name", "stdin").strip("<>")
        asked = problem.read(file.read(), module.Problem, of)
        try:
            answer = module.solve(asked, **options)
        except problem.BadProblem as exc:
            raise problem.BadProblem(f"{of}: {exc}") from exc
        told: list[str] = module.explain(asked, answer) if explain else []
        if as_json:
            content = msgspec.to_builtins(answer)
            output.show_json({**content, "explanation": told} if told else content)
            return
        output.table(*module.rows(answer))
        for line in ("", *told) if told else ():
            output.show(line)

    made = declare.command(name, short_help=solver.help, help=f"{solver.help} {_READS}", epilog=_EXAMPLES.format(name))(
        run
    )
    explain = click.Option(["--explain"], is_flag=True, help="Add the working in words.")
    made.params += [click.Argument(["file"], type=click.File("rb")), explain, *solver.options]
    return made


for _name, _solver in _SOLVERS.items():
    command.add_command(_make(_name, _solver))
