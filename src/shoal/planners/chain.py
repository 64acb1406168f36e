"""The dynamic program for chains of blocks: which storages to keep, which to compute again, once or several times.

Other names: Rotor, optimal checkpointing of heterogeneous chains, recursive or multi-level checkpointing; for blocks of
one size and one cost it is Revolve.
Griewank, Walther, "Algorithm 799: Revolve", 2000. Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited memory", 2019 (Rotor). Zhao, Le
Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an Efficient, Fast, Automatic and Generic Tool for
Re-materialization in PyTorch", 2023 (several options a block).

The step is cut into at most `MAX_BLOCKS` blocks where few bytes cross, or, where no plan fits so, into as many as
`MAX_BLOCKS_OF_SMALLEST`. A cut is the set of storages that cross it, so skips and concatenations need nothing special;
options cover several neighbouring blocks, so that long residual sums can come back as one. One table holds the answer
for every amount of memory. Its model is approximate (bytes in slots, shared storages not always seen as shared), so
every distinct plan on it is played by the exact simulator, and a budget gets the fastest of those that truly fit. What
is considered in one table does not depend on the budget: of plans that fit with few blocks, more bytes never give a
slower one.

It meets Revolve's counts on equal layers, and on chains of convolutions, up to the width of a slot, no choice of what
to keep and what to compute once more is better; the tests compare with every one.

Not yet good: a storage held from the forward pass on is held until its last reader, even where giving it up and
computing it once more would pay; blocks have few options, ordered by seconds per byte only; small storages are always
kept; long skips (U-Net) make wide cuts whose storages the model holds longer than need be. It has no lower bound.

The table: `seconds[w, s, t, m]` is the least recomputation that carries out the phases t, t-1, ..., s of the backward
pass inside m slots of memory, when phase t is about to begin and what the phases need of the blocks before s is in
memory (and not counted in m). With w = 0 what block t handed to block t+1 is in memory, too (and counted); with w = 1
it is not. There are four ways on:

- hold r: run the blocks s..r-1, hold only what the blocks from r on start from, carry out r..t, then s..r-1, either
  with what block r-1 handed on (held meanwhile) or without;
- keep o: run some blocks s..r-1 and keep what option o says, carry out r..t, then s..r-1 with the kept storages,
  recomputing the others as late as they are read;
- reach t: run all blocks s..t-1, hold nothing, carry out phase t only, then s..t-1 from the start again;
- leaf: s = t, carry out the phase, recomputing what it reads as late as it reads it.

For t = n-1 the blocks run in the forward pass itself, which costs nothing extra and meets smaller base bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.residence import Keep, Recompute, Residence
from shoal.core.step import StepGraph
from shoal.planners.chain_blocks import Blocks, Option, choose_cuts, members
from shoal.planners.infeasible import infeasible
from shoal.planners.just_in_time import just_in_time
from shoal.planners.simulated import Simulated, simulated

# The table grows with the cube of the blocks. With 60 the smallest peaks of two residual steps of some 60 ops were 3
# and 12 % lower than with 30; plans of five networks at a quarter of the way to plain PyTorch's peak were not faster.
MAX_BLOCKS = 30
MAX_BLOCKS_OF_SMALLEST = 60
SLOTS = 400  # with 150 the plans of four of five steps were up to 7 % slower
WITH, WITHOUT = 0, 1  # what the last block handed on


def chain(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The fastest plan of the dynamic program that fits.

    Args:
        graph: the step, with seconds and workspaces.
        hardware: named in the plan; the step's times already are for it.
        budget_bytes: the most device bytes in use at any moment.

    Raises:
        BudgetError: none fits.
    """
    started = time.perf_counter()
    tables = (frontier(graph, max_blocks) for max_blocks in (MAX_BLOCKS, MAX_BLOCKS_OF_SMALLEST))
    fits = ([found for found in table if found.peak_bytes <= budget_bytes] for table in tables)
    fitting = next(filter(None, fits), None)
    if fitting is None:
        raise infeasible(smallest_peak(graph, hardware), budget_bytes)
    best = min(fitting, key=lambda found: found.seconds)
    planning_seconds = time.perf_counter() - started
    return Plan(graph, best.residences, "chain", hardware.name, budget_bytes, planning_seconds=planning_seconds)


def smallest_peak(graph: StepGraph, hardware: Hardware) -> Plan:
    """The plan with the smallest peak that this planner finds, however slow."""
    best = min(frontier(graph, MAX_BLOCKS_OF_SMALLEST), key=lambda found: found.peak_bytes)
    return Plan(graph, best.residences, "chain", hardware.name, best.peak_bytes)


@lru_cache(maxsize=4)  # planning again for another budget, as a repair does, costs nothing
def frontier(graph: StepGraph, max_blocks: int = MAX_BLOCKS) -> tuple[Simulated, ...]:
    """The plans found that no other beats in both bytes and seconds, the least peak first."""
    everything = simulated(graph, just_in_time(graph, range(len(graph.storages))))
    found = [everything]
    if graph.n_forward:
        blocks = Blocks(graph, choose_cuts(graph, max_blocks))
        table = ChainTable(blocks, everything.peak_bytes, SLOTS)
        plans = {plan.key: plan for slots in range(SLOTS + 1) if (plan := table.held(slots)) is not None}
        found += [simulated(graph, _residences_of(blocks, plan)) for plan in plans.values()]
    return _undominated(found)


def _undominated(found: list[Simulated]) -> tuple[Simulated, ...]:
    best: list[Simulated] = []
    for plan in sorted(found, key=lambda plan: (plan.peak_bytes, plan.seconds)):
        if not best or plan.seconds < best[-1].seconds:
            best.append(plan)
    return tuple(best)


def _residences_of(blocks: Blocks, plan: Held) -> dict[str, Residence]:
    """The residences that carry out `plan`, each recomputation as late as possible.

    Before a backward op comes back what it reads and, at the first such op of a phase, what the plan holds meanwhile;
    after it goes what the phase may not hold. Both only change where a storage is computed again: the schedule frees
    each instance after its last reader by itself.
    """
    graph = blocks.graph
    before: dict[int, list[str]] = {}
    always = plan.kept
    there = always
    for phase in reversed(range(blocks.n)):
        may_stay = plan.held[phase] | always
        if phase not in plan.afresh:
            may_stay |= plan.allowed[phase] | blocks.made_in(phase, blocks.n)
        wanted = plan.held[phase] & blocks.free
        for i in blocks.phases[phase]:
            if not blocks.reads[i] & ~there:
                continue
            target = blocks.reads[i] | wanted
            read, made = target, 0
            for op in blocks.closure(target, there):
                read |= blocks.reads[op]
                made |= blocks.writes[op]
            made &= read & ~there  # what these ops write besides is dropped at once
            for storage in members(made):
                before.setdefault(storage, []).append(graph.ops[i].name)
            there = (there | made) & may_stay
            wanted = 0
        if phase in plan.reached:
            there &= plan.held[phase] | always
    residences: dict[str, Residence] = {}
    saved = set(graph.saved)
    for s in graph.storages:
        if s.id in before:
            residences[s.name] = Recompute(tuple(before[s.id]))
        elif s.id in saved or always >> s.id & 1:
            residences[s.name] = Keep()
    return residences


class ChainRow(NamedTuple):
    """One way on from (w, s, t).

    Attributes:
        seconds: its own recomputation, the parts' apart.
        min_bytes: what m must cover for it, the parts apart.
        right: the first block of the right part; the part ends with t and has the same w, or is empty (t+1).
        taken_bytes: what is held during the right part.
        left: the w of the left part, which is s..left_end; -1 for none.
        left_end: its last block.
        holds: what is held from here on; it is kept where the forward pass itself comes by.
        until: what of it may not be given up during the right part.
    """

    seconds: float
    min_bytes: int
    right: int
    taken_bytes: int
    left: int
    left_end: int
    holds: int
    until: int


@dataclass
class Held:
    """The decisions of the dynamic program, by phase.

    Attributes:
        kept: storages kept from the forward pass on.
        held: for every phase, the storages of earlier blocks that must be there meanwhile.
        allowed: for every phase, those that may stay once they are there.
        afresh: the phases that drop after each op what was recomputed for it.
        reached: the phases that use up what they start from.
    """

    kept: int
    held: list[int]
    allowed: list[int]
    afresh: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal decisions."""
        return self.kept, tuple(self.held), tuple(self.allowed), frozenset(self.afresh), frozenset(self.reached)


class ChainTable:
    """The filled table; `held(slots)` reads a plan off it.

    Args:
        blocks: the chain.
        max_bytes: what `slots` slots stand for, together with the bytes that are always in use.
    """

    def __init__(self, blocks: Blocks, max_bytes: int, slots: int) -> None:
        self.blocks, self.slots, self.n = blocks, slots, blocks.n
        self.static_bytes = blocks.graph.resident_bytes
        self.slot_bytes = max(1.0, (max_bytes - self.static_bytes) / slots)
        n = self.n
        self.options: list[list[Option]] = [blocks.options(s) for s in range(n)]
        self.passes = [blocks.pass_over(s, s + 1) for s in range(n)]
        self.leaves = [[self._leaves(w, s) for s in range(n)] for w in (WITH, WITHOUT)]
        self.reached = [[self._reached(w, s) for s in range(n)] for w in (WITH, WITHOUT)]
        self.seconds: NDArray[np.float64] = np.full((2, n, n, slots + 1), np.inf)
        self.choice: NDArray[np.int16] = np.full((2, n, n, slots + 1), -1, np.int16)
        self._rows_read: dict[tuple[int, int, int], list[ChainRow]] = {}
        for length in range(n):
            for s in range(n - length):
                for w in (WITH, WITHOUT):
                    self._fill(w, s, s + length)

    def _slots(self, nbytes: NDArray[np.float64]) -> NDArray[np.int64]:
        """Sums of many of these are compared, so they are rounded to the nearest, not up."""
        return np.rint(nbytes / self.slot_bytes).astype(np.int64)

    def _fill(self, w: int, s: int, t: int) -> None:
        m = np.arange(self.slots + 1)
        rows = self._rows(w, s, t)
        seconds, least, right, taken, left, left_end = np.array([row[:6] for row in rows], float).T
        cost = np.where(m >= self._slots(least - self.static_bytes)[:, None], seconds[:, None], np.inf)
        given = m - self._slots(taken)[:, None]
        cost[given < 0] = np.inf
        goes_on = right <= t
        after = self.seconds[w, right[goes_on].astype(int)[:, None], t, np.maximum(given[goes_on], 0)]
        cost[goes_on] += after
        parted = left >= 0
        cost[parted] += self.seconds[left[parted].astype(int), s, left_end[parted].astype(int)]
        best = cost.argmin(axis=0)
        self.seconds[w, s, t] = cost[best, m]
        self.choice[w, s, t] = best

    def _leaves(self, w: int, s: int) -> list[tuple[float, int]]:
        """(seconds, bytes in addition to what is needed of earlier blocks) of a phase that finds nothing kept."""
        needed = self.blocks.needed(w, s, s)
        there = needed | (self.blocks.handed_on[s] if w == WITH else 0)
        costs = [self.blocks.phase_costs(s, s + 1, there, afresh) for afresh in (False, True)]
        return [(seconds, peak - self.blocks.bytes_of(needed)) for peak, seconds in costs]

    def _reached(self, w: int, s: int) -> tuple[float, int]:
        """(seconds, bytes) of a phase that may use up what it needs of earlier blocks."""
        there = self.blocks.needed(w, s, s) | (self.blocks.handed_on[s] if w == WITH else 0)
        peak, seconds = self.blocks.phase_costs(s, s + 1, there, stays=0)
        return seconds, peak

    def _pass_bytes(self, w: int, s: int, t: int, blocks_run: tuple[int, int], peak_bytes: int) -> int:
        """What running some blocks on the way from s to t takes, above what is needed of the blocks before s."""
        blocks = self.blocks
        k, end = blocks_run
        across = blocks.crossing[k]
        not_counted = across & blocks.needed(w, s, t)
        if t == self.n - 1:
            return max(blocks.forward_bytes[k:end]) + peak_bytes - blocks.bytes_of(not_counted)
        not_counted |= across & ~blocks.needed(w, k, t)  # not there when the block runs again
        waiting = blocks.handed_on[t] if w == WITH else 0
        return blocks.onset_bytes[t] + peak_bytes + blocks.bytes_of(waiting) - blocks.bytes_of(not_counted)

    def _rows(self, w: int, s: int, t: int) -> list[ChainRow]:
        """The ways on: first two leaves where s = t, then those that hold, then those that keep."""
        blocks = self.blocks
        needed, bytes_of = blocks.needed, blocks.bytes_of
        again = t < self.n - 1
        there = needed(w, s, t)
        rows = []
        if s == t:
            pass_bytes = 0 if again else self._pass_bytes(w, t, t, (t, t + 1), self.passes[t][0])
            rows = [
                ChainRow(seconds, max(peak, pass_bytes), t + 1, 0, -1, -1, 0, there)
                for seconds, peak in self.leaves[w][t]
            ]
        sweep_bytes, sweep_seconds = 0, 0.0
        for r in range(s + 1, t + 1):
            peak, seconds = self.passes[r - 1]
            sweep_bytes = max(sweep_bytes, self._pass_bytes(w, s, t, (r - 1, r), peak))
            sweep_seconds += seconds if again else 0.0
            start, handed_on = needed(w, r, t), blocks.handed_on[r - 1]
            for left, holds in ((WITH, start | handed_on), (WITHOUT, start)):
                if left == WITHOUT and not handed_on & ~start:
                    continue
                nothing_to_run = again and not holds & ~there
                rows.append(
                    ChainRow(
                        0.0 if nothing_to_run else sweep_seconds,
                        0 if nothing_to_run else sweep_bytes,
                        r,
                        bytes_of(holds & ~there),
                        left,
                        r - 1,
                        holds,
                        needed(left, s, r - 1) | (handed_on if left == WITH else 0),
                    )
                )
        if again and s < t:
            seconds, peak = self.reached[w][t]
            until = needed(WITHOUT, s, t - 1)
            rows.append(ChainRow(sweep_seconds + seconds, max(sweep_bytes, peak), t + 1, 0, WITHOUT, t - 1, 0, until))
        for option in self.options[s]:
            end = option.end
            if end > t + 1 or (end == t + 1 and again):
                continue
            pass_bytes = self._pass_bytes(w, s, t, (s, end), option.pass_peak_bytes)
            holds = option.keeps | (needed(w, end, t) if end <= t else 0)
            rows.append(
                ChainRow(
                    option.phase_seconds + (option.pass_seconds if again else 0.0),
                    max(pass_bytes, option.phase_peak_bytes - bytes_of(option.needs)),
                    end,
                    bytes_of(holds & ~there),
                    -1,
                    -1,
                    holds,
                    option.keeps | option.needs,
                )
            )
        return rows

    def held(self, slots: int) -> Held | None:
        """The decisions for this much memory; None where the program finds none."""
        n = self.n
        if not np.isfinite(self.seconds[WITH, 0, n - 1, slots]):
            return None
        found = Held(0, [0] * n, [0] * n)
        todo = [(WITH, 0, n - 1, slots, 0)]
        while todo:
            w, s, t, m, outer = todo.pop()
            rows = self._rows_read.get((w, s, t))
            if rows is None:
                rows = self._rows_read[w, s, t] = self._rows(w, s, t)
            choice = int(self.choice[w, s, t, m])
            row = rows[choice]
            if t == n - 1:
                found.kept |= row.holds
            if s == t and choice == 1:
                found.afresh.add(s)
            if row.right <= t:
                taken = int(self._slots(np.array(row.taken_bytes, float)))
                todo.append((w, row.right, t, m - taken, outer | row.until))
            if row.left >= 0:
                todo.append((row.left, s, row.left_end, m, outer))
                if row.right > t:
                    found.held[t] = outer | row.until
                    found.allowed[t] = self.blocks.crossing[t]
                    found.reached.add(t)
            else:
                span = self.blocks.made_in(s, row.right)
                for j in range(s, row.right):
                    found.held[j] = outer | row.until & ~span
                    found.allowed[j] = span
        return found
