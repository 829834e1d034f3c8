"""
Integer programmes, solved by HiGHS: columns with bounds and costs, rows with bounds, the least cost.

HiGHS is imported when a programme is solved: `pip install 'gpufaas[plans]'`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpufaas_core._types import Seconds
from gpufaas_core.errors import GpufaasError

FEASIBILITY: Final = 1e-9
"""The most by which a row may be missed; HiGHS's default is 1e-6."""
_OPTIONS: Final[dict[str, bool | int | float]] = {
    "output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": FEASIBILITY, "primal_feasibility_tolerance": FEASIBILITY,
}  # fmt: skip


class Row(NamedTuple):
    """``low <= sum of coefficient * column <= high``."""

    columns: Sequence[int]
    coefficients: Sequence[float]
    low: float
    high: float


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


def minimise(programme: Programme, time_limit: Seconds = math.inf) -> Solution:
    """
    Return a solution of least cost, or the best one that *time_limit* leaves time for.

    :raises GpufaasError: HiGHS is not installed
    """
    try:
        import highspy
    except ImportError as exc:
        raise GpufaasError("this plan is made by the solver HiGHS: pip install 'gpufaas[plans]'") from exc
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (*_OPTIONS.items(), ("time_limit", time_limit)):
        solver.setOptionValue(option, value)
    kind = highspy.HighsVarType
    columns = zip(programme.costs, programme.highs, programme.whole, strict=True)
    for column, (cost, high, whole) in enumerate(columns):
        solver.addVar(0.0, high)
        solver.changeColCost(column, cost)
        solver.changeColIntegrality(column, kind.kInteger if whole else kind.kContinuous)
    for row in programme.rows:
        solver.addRow(row.low, row.high, len(row.columns), list(row.columns), list(row.coefficients))
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    optimal = status in (
        highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    )  # fmt: skip
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not found:
        return Solution(None, info.mip_dual_bound, optimal, solver.getRunTime())
    values = map(float, solver.getSolution().col_value)
    rounded = tuple(
        float(round(value)) if whole else value for value, whole in zip(values, programme.whole, strict=True)
    )
    duals = () if any(programme.whole) else tuple(map(float, solver.getSolution().row_dual))
    return Solution(rounded, info.mip_dual_bound, optimal, solver.getRunTime(), duals)
