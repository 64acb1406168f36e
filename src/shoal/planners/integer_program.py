"""The mixed-integer program of `joint` and of its lower bound, solved with HiGHS.

For every candidate storage s a binary k_s says whether it is kept. For every op o that may run again y_o >= 1 - k_s
for each s it writes or is dragged along by. For every demand i before the one at which s is due, a continuous b_si says
whether s is back early, because the recomputation of another storage d reads it:

    b_si >= (1 - k_d) - k_s      at the demand i at which d is due,
    b_si >= b_di - k_s           at earlier demands,
    b_si >= b_s(i-1)             once back it stays,

and at every position what is fixed, kept and back early must fit the budget:

    fixed + sum over waiting s of bytes_s * (k_s + b_si) <= budget.

With binary k the least b is integral, so only the k need branching. The objective is the time of the reruns. Without
the b the program is a relaxation for every plan that keeps or recomputes, however often: its optimum is the lower
bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

from shoal.planners.recompute_choice import RecomputeChoice

_WINDOW = 48  # a storage may be back at most so many demands early


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    Attributes:
        kept: candidates to keep; None where it found none in time or there is none.
        added_seconds: time of the reruns.
        bound_seconds: proven least time; infinite where no choice fits.
    """

    kept: frozenset[int] | None
    added_seconds: float
    bound_seconds: float


def solve(
    choice: RecomputeChoice,
    budget_bytes: int | None,
    *,
    early: bool = True,
    start: frozenset[int] | None = None,
    time_limit_seconds: float,
    gap: float = 0.002,
) -> Solution:
    """Solve the program.

    Args:
        choice: the step's numbers.
        budget_bytes: most bytes in use at any position. None asks for the least possible peak instead.
        early: count what is back early. False gives the relaxation for the lower bound.
        start: candidates kept by a choice to start from.
        time_limit_seconds: after it, the best found so far counts.
        gap: relative gap at which to stop.
    """
    program = _Program(choice, budget_bytes, early)
    return program.run(start, time_limit_seconds, gap)


class _Program:
    """Builds the rows and columns and hands them to HiGHS."""

    def __init__(self, choice: RecomputeChoice, budget_bytes: int | None, early: bool) -> None:
        self.choice = choice
        self._costs: list[float] = []
        self._most: list[float] = []
        self._binary: list[bool] = []
        self._lower: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._values: list[float] = []
        self.hopeless = False
        ops = choice.graph.ops
        self.keep = {s: self._variable(0.0, binary=True) for s in choice.candidates}
        self.rerun = {
            op: self._variable(ops[op].second.seconds)
            for op in sorted({op for s in choice.candidates for op in choice.reruns[s]})
        }
        self.saved = frozenset(choice.graph.saved).intersection(choice.candidates)
        self.back: dict[tuple[int, int], int] = {}
        self._add_reruns()
        if early:
            self._add_back_early()
        self._add_memory(budget_bytes)

    def _variable(self, cost: float, *, binary: bool = False, most: float = 1.0) -> int:
        self._costs.append(cost)
        self._most.append(most)
        self._binary.append(binary)
        return len(self._costs) - 1

    def _at_least(self, lower: float, entries: Mapping[int, float]) -> None:
        self._lower.append(lower)
        self._columns.extend(entries)
        self._values.extend(entries.values())
        self._starts.append(len(self._columns))

    def _add_reruns(self) -> None:
        choice, producer = self.choice, self.choice.graph.producer
        for storage in choice.candidates:
            if storage in self.saved:
                for op in choice.reruns[storage]:
                    self._at_least(1.0, {self.rerun[op]: 1.0, self.keep[storage]: 1.0})
            for needed in choice.needs[storage]:
                if needed not in self.saved:
                    asked_by = self.rerun[producer[storage]]
                    for op in choice.reruns[needed]:
                        if self.rerun[op] != asked_by:
                            self._at_least(0.0, {self.rerun[op]: 1.0, self.keep[needed]: 1.0, asked_by: -1.0})

    def _add_back_early(self) -> None:
        choice = self.choice
        last = {s: choice.due[s] - (s in self.saved) for s in choice.candidates}
        for storage in choice.candidates:
            demands = range(max(1, choice.due[storage] - _WINDOW), last[storage] + 1)
            for demand in demands:
                self.back[storage, demand] = self._variable(0.0)
                if (storage, demand - 1) in self.back:
                    self._at_least(0.0, {self.back[storage, demand]: 1.0, self.back[storage, demand - 1]: -1.0})
        for reader in choice.candidates:
            for needed in choice.needs[reader]:
                for demand in range(1, min(choice.due[reader], last[needed]) + 1):
                    entries = {self.keep[needed]: 1.0}
                    if (needed, demand) in self.back:
                        entries[self.back[needed, demand]] = 1.0
                    if reader in self.saved and demand == choice.due[reader]:
                        self._at_least(1.0, {**entries, self.keep[reader]: 1.0})
                    elif (reader, demand) in self.back:
                        self._at_least(0.0, {**entries, self.back[reader, demand]: -1.0})

    def _add_memory(self, budget_bytes: int | None) -> None:
        storages = self.choice.graph.storages
        unit_bytes = budget_bytes or max(row.fixed_bytes for row in self.choice.rows)
        peak = None if budget_bytes else self._variable(self._total_cost() * 1e3, most=math.inf)
        for row in self.choice.rows:
            fixed_bytes = row.fixed_bytes if self.back else row.fixed_bytes - row.small_bytes
            room = 0.0 if peak is not None else 1.0
            room -= fixed_bytes / unit_bytes
            entries: dict[int, float] = {}
            for storage in row.waiting:
                share = storages[storage].nbytes / unit_bytes
                entries[self.keep[storage]] = -share
                if (storage, row.interval) in self.back:
                    entries[self.back[storage, row.interval]] = -share
            if peak is not None:
                entries[peak] = 1.0
                self._at_least(-room, entries)
            elif room < 0:
                self.hopeless = True
            elif -sum(entries.values()) > room:
                self._at_least(-room, entries)

    def _total_cost(self) -> float:
        return max(sum(self._costs), 1e-12)

    def run(self, start: frozenset[int] | None, time_limit_seconds: float, gap: float) -> Solution:
        if self.hopeless:
            return Solution(None, math.inf, math.inf)
        scale = self._total_cost()
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", float(time_limit_seconds))
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("mip_abs_gap", 1e-5)
        solver.passModel(self._model(scale))
        if start is not None:
            places = np.array([self.keep[s] for s in self.choice.candidates], dtype=np.int32)
            first_values = np.array([float(s in start) for s in self.choice.candidates])
            solver.setSolution(len(places), places, first_values)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solution(None, math.inf, math.inf)
        bound_seconds = max(0.0, info.mip_dual_bound * scale) if math.isfinite(info.mip_dual_bound) else 0.0
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Solution(None, math.inf, bound_seconds)
        values = solver.getSolution().col_value
        kept = frozenset(s for s, column in self.keep.items() if values[column] > 0.5)
        return Solution(kept, info.objective_function_value * scale, bound_seconds)

    def _model(self, scale: float) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._costs), len(self._lower)
        model.col_cost_ = np.array(self._costs) / scale
        model.col_lower_ = np.zeros(len(self._costs))
        model.col_upper_ = np.array(self._most)
        model.row_lower_ = np.array(self._lower)
        model.row_upper_ = np.full(len(self._lower), highspy.kHighsInf)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts)
        model.a_matrix_.index_ = np.array(self._columns)
        model.a_matrix_.value_ = np.array(self._values)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[binary] for binary in self._binary]
        return model
