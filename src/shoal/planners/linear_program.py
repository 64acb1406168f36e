"""A mixed-integer program under construction: columns with costs, rows with lower bounds, solved with HiGHS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np


@dataclass(frozen=True)
class Optimum:
    """What the solver found.

    Attributes:
        values: of the variables; None where it found none within its limits or there is none.
        cost: of those values; infinite where there are none.
        cost_bound: proven least cost; infinite where no values satisfy all rows.
        timed_out: whether the time limit ended it.
    """

    values: Sequence[float] | None
    cost: float
    cost_bound: float
    timed_out: bool = False


# Constructing `Highs` itself writes a banner to stdout in 1.16 (docs/upstream.md); its callbacks are of no use here.
_Solver = getattr(highspy, "_Highs", highspy.Highs)
_SUB_PROGRAMS = ("mip_heuristic_run_rens", "mip_heuristic_run_rins", "mip_heuristic_run_root_reduced_cost")


class LinearProgram:
    """Minimise the sum of costs such that every row is at least its bound. Variables are numbered as they are made.

    Args:
        unit_cost: a cost that counts as 1 for the solver's tolerances; 0 for what all variables at 1 cost.
    """

    def __init__(self, unit_cost: float = 0.0) -> None:
        self._unit_cost = unit_cost
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._binary: list[bool] = []
        self._lower: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._values: list[float] = []

    def variable(self, cost: float = 0.0, *, binary: bool = False, upper: float = 1.0) -> int:
        """A variable between 0 and `upper`."""
        self._costs.append(cost)
        self._upper.append(upper)
        self._binary.append(binary)
        return len(self._costs) - 1

    def at_least(self, lower: float, entries: Mapping[int, float]) -> None:
        """The sum of factor times variable over `entries` must be at least `lower`."""
        self._lower.append(lower)
        self._columns.extend(entries)
        self._values.extend(entries.values())
        self._starts.append(len(self._columns))

    @property
    def objective(self) -> dict[int, float]:
        """The variables that cost something, with their costs."""
        return {variable: cost for variable, cost in enumerate(self._costs) if cost}

    @property
    def entries(self) -> int:
        """Factors in all rows."""
        return len(self._columns)

    @property
    def unit_cost(self) -> float:
        """The cost that counts as 1."""
        return self._unit_cost or max(sum(self._costs), 1e-12)

    def run(
        self,
        start: Mapping[int, float] | None = None,
        *,
        whole: bool = True,
        gap: float,
        max_nodes: int,
        max_simplex_iterations: int,
        sub_programs: bool = True,
        time_limit_seconds: float,
    ) -> Optimum:
        """Solve it.

        Args:
            start: values to begin with, of some variables or of all.
            whole: take binaries for such. False lets one be any number between 0 and 1: a linear program, which takes a
                small part of the time.
            gap: relative gap at which to stop.
            max_nodes: of the branch-and-bound tree.
            max_simplex_iterations: of a linear program.
            sub_programs: let the solver look for values in smaller mixed-integer programs (RENS, RINS). At the root
                they have no limit but the time.
            time_limit_seconds: never reached where the others are chosen well: what it cuts off depends on the machine.
        """
        scale = self.unit_cost
        solver = _Solver()
        options: dict[str, bool | int | float | str] = {
            "output_flag": False,
            "random_seed": 0,
            "parallel": "off",
            "threads": 1,
            "time_limit": float(time_limit_seconds),
            "mip_rel_gap": gap,
            "mip_abs_gap": 1e-5,
            "mip_max_nodes": max_nodes,
        }
        if not whole:
            options["simplex_iteration_limit"] = max_simplex_iterations
        if not sub_programs:
            options.update(dict.fromkeys(_SUB_PROGRAMS, False))
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(self._model(scale, whole))
        if start is not None:
            places = np.array(list(start), dtype=np.int32)
            solver.setSolution(len(places), places, np.array(list(start.values()), dtype=float))
        if solver.run() == highspy.HighsStatus.kError:  # other code of this process runs HiGHS with more threads
            highspy.Highs.resetGlobalScheduler(True)
            solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        timed_out = status == highspy.HighsModelStatus.kTimeLimit
        if status == highspy.HighsModelStatus.kInfeasible:
            return Optimum(None, math.inf, math.inf)
        if not whole:
            optimal = status == highspy.HighsModelStatus.kOptimal
            cost_bound = max(0.0, info.objective_function_value * scale) if optimal else 0.0
        else:
            cost_bound = max(0.0, info.mip_dual_bound * scale) if math.isfinite(info.mip_dual_bound) else 0.0
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Optimum(None, math.inf, cost_bound, timed_out)
        return Optimum(solver.getSolution().col_value, info.objective_function_value * scale, cost_bound, timed_out)

    def _model(self, scale: float, whole: bool) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._costs), len(self._lower)
        model.col_cost_ = np.array(self._costs) / scale
        model.col_lower_ = np.zeros(len(self._costs))
        model.col_upper_ = np.array(self._upper)
        model.row_lower_ = np.array(self._lower)
        model.row_upper_ = np.full(len(self._lower), highspy.kHighsInf)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts)
        model.a_matrix_.index_ = np.array(self._columns)
        model.a_matrix_.value_ = np.array(self._values)
        if whole:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[binary] for binary in self._binary]
        return model
