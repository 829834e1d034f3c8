"""
Integer programmes, solved by HiGHS: columns with bounds and costs, rows with bounds, the least cost.

HiGHS is imported when a programme is solved: `pip install 'gpufaas[plans]'`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gpufaas_core._types import Seconds
from gpufaas_core.errors import GpufaasError

if TYPE_CHECKING:
    import highspy

FEASIBILITY: Final = 1e-9
"""A row may be missed by so much; HiGHS's default is 1e-6."""


@dataclass(frozen=True, slots=True)
class Row:
    """``low <= sum of coefficient * column <= high``."""

    columns: Sequence[int]
    coefficients: Sequence[float]
    low: float = -math.inf
    high: float = math.inf


@dataclass(slots=True)
class Programme:
    costs: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(self, cost: float, high: float = math.inf, whole: bool = True) -> int:
        """Add a column from 0 to *high*; return its index."""
        self.costs.append(cost)
        self.highs.append(high)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(
        self, columns: Sequence[int], coefficients: Sequence[float], low: float = -math.inf, high: float = math.inf
    ) -> int:
        """Add ``low <= sum of coefficient * column <= high``; return its index."""
        self.rows.append(Row(columns, coefficients, low, high))
        return len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class Solution:
    values: tuple[float, ...] | None
    """The value of each column; `None` if no solution was found."""
    bound: float
    """No solution costs less."""
    optimal: bool
    """Whether the search ended by itself: without values, there is no solution then."""
    seconds: Seconds = 0.0
    """What the search took."""
    duals: tuple[float, ...] = ()
    """The dual value of each row, when no column is whole: what one more unit of it costs."""


def minimise(programme: Programme, time_limit: Seconds | None = None) -> Solution:
    """
    Return a solution of least cost, or the best one that *time_limit* leaves time for.

    :raises GpufaasError: HiGHS is not installed
    """
    try:
        import highspy
    except ImportError as exc:
        raise GpufaasError("this plan is made by the solver HiGHS: pip install 'gpufaas[plans]'") from exc
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in _options(time_limit).items():
        solver.setOptionValue(option, value)
    _pass(programme, solver, highspy)
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    optimal = status in (
        highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    )  # fmt: skip
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = tuple(map(float, solver.getSolution().col_value)) if found else None
    duals = () if any(programme.whole) or not found else tuple(map(float, solver.getSolution().row_dual))
    return Solution(_rounded(programme, values), info.mip_dual_bound, optimal, solver.getRunTime(), duals)


def _options(time_limit: Seconds | None) -> dict[str, bool | int | float]:
    options: dict[str, bool | int | float] = {
        "output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": FEASIBILITY, "primal_feasibility_tolerance": FEASIBILITY,
    }  # fmt: skip
    return options if time_limit is None else {**options, "time_limit": time_limit}


def _pass(programme: Programme, solver: "highspy.Highs", highs: Any) -> None:
    kind = highs.HighsVarType
    for column, (cost, high) in enumerate(zip(programme.costs, programme.highs, strict=True)):
        solver.addVar(0.0, high)
        solver.changeColCost(column, cost)
        solver.changeColIntegrality(column, kind.kInteger if programme.whole[column] else kind.kContinuous)
    for row in programme.rows:
        solver.addRow(row.low, row.high, len(row.columns), list(row.columns), list(row.coefficients))


def _rounded(programme: Programme, values: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if values is None:
        return None
    return tuple(float(round(value)) if whole else value for value, whole in zip(values, programme.whole, strict=True))
