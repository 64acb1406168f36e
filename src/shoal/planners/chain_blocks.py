"""A step seen as a chain of blocks: what each run of blocks needs, keeps, costs and occupies.

Sets of storages are ints used as bit sets (bit i is storage i). Only the storages a plan can give up take part; the
others (parameters, outputs, what must not be recomputed, and small ones that are not worth a decision) are always
there and are part of the base bytes of a position.

The backward pass is divided into phases, one a block: phase j ends with the last backward op that reads a storage
of block j or a later one. So phase j needs storages of blocks up to j only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.planners.transfer_places import last_forward_reader

WORTH_A_CUT = 0.05  # of the saved bytes of an average op
SMALL_SHARE = 0.002  # the smallest saved storages that together are under this share of all are always kept
# On the way from keeping least to keeping all; with 3 plans of a GPT in half of its bytes were 0.7 % slower.
MAX_OPTIONS = 8
# How many neighbouring blocks an option covers; with 1 only, plans of a GPT in half of its bytes were 5 % slower.
SPANS = (1, 2, 3, 4, 6, 8, 11)


@dataclass(frozen=True)
class Option:
    """What some neighbouring blocks keep of their own storages until their backward phases, and what that costs.

    Attributes:
        end: the block after them.
        keeps: the storages of the blocks that stay.
        needs: the storages of earlier blocks that the phases still need.
        pass_peak_bytes: most bytes of give-up-able storages and workspace while the blocks' forward ops run.
        pass_seconds: how long these take when they run again.
        phase_seconds: recomputation during the phases.
        phase_peak_bytes: most bytes in use during the phases, everything counted.
    """

    end: int
    keeps: int
    needs: int
    pass_peak_bytes: int
    pass_seconds: float
    phase_seconds: float
    phase_peak_bytes: int


class Blocks:
    """The forward pass cut at `cuts`, with everything the dynamic program asks of it."""

    def __init__(self, graph: StepGraph, cuts: list[int]) -> None:
        self.graph = graph
        self.n = len(cuts) + 1
        self.borders = [0, *cuts, graph.n_forward]
        self.nbytes = [s.nbytes for s in graph.storages]
        self._bytes_of: dict[int, int] = {0: 0}
        self.free = bits(_can_be_given_up(graph))
        self.reads = [bits(op.reads) & self.free for op in graph.ops]
        self.writes = [bits(op.writes) & self.free for op in graph.ops]
        self.made = [self._made_by(range(*self.borders[j : j + 2])) for j in range(self.n)]
        crossing = crossing_sets(graph)
        self.crossing = [bits(crossing[p]) & self.free for p in self.borders]
        self.saved = bits(graph.saved) & self.free
        # Whoever carries out the phases after j holds this much of block j, and phase j finds it there.
        self.handed_on = [self.crossing[j + 1] & self.made[j] & self.saved for j in range(self.n)]
        self._divide_backward()
        self._base_bytes()

    def bytes_of(self, mask: int) -> int:
        """The bytes of a set of storages."""
        known = self._bytes_of.get(mask)
        if known is None:
            known = self._bytes_of[mask] = sum(self.nbytes[s] for s in members(mask))
        return known

    def _made_by(self, ops: Iterable[int]) -> int:
        made = 0
        for i in ops:
            made |= self.writes[i]
        return made

    def _divide_backward(self) -> None:
        """`phases[j]`: the ids of the backward ops (the loss op among them) of phase j."""
        block_of = {s: j for j in range(self.n) for s in members(self.made[j])}
        self.phases: list[list[int]] = [[] for _ in range(self.n)]
        top = 0
        for i in reversed(range(self.graph.n_forward, len(self.graph.ops))):
            top = max([top, *(block_of[s] for s in members(self.reads[i]))])
            self.phases[top].append(i)
        for phase in self.phases:
            phase.reverse()

    def _base_bytes(self) -> None:
        """`base[i]`: bytes in use while op i runs (its workspace counted) in addition to those a plan can give up."""
        graph = self.graph
        in_use = graph.resident_bytes
        self.base: list[int] = []
        self.base_before: list[int] = []
        for run in schedule(graph, {}):
            self.base_before.append(in_use)
            fixed = [s for s in run.writes if not self.free >> s & 1]
            in_use += sum(self.nbytes[s] for s in fixed)
            taken = run.takes_over >= 0 and not self.free >> run.takes_over & 1 and bool(fixed)
            if taken:
                in_use -= self.nbytes[run.takes_over]
            workspace = graph.ops[run.op].workspace_bytes
            self.base.append(in_use + workspace)
            gone = [s for s in run.frees if not self.free >> s & 1 and not (taken and s == run.takes_over)]
            in_use -= sum(self.nbytes[s] for s in gone)

    def needed(self, without: int, s: int, t: int) -> int:
        """The storages written before block s that recomputing for the phases s..t starts from.

        Args:
            without: 0 where phase t finds what block t handed on, else 1.
        """
        return self._needed[without][s][t]

    @cached_property
    def _needed(self) -> list[list[list[int]]]:
        tables = []
        for handed_on in (self.handed_on, [0] * self.n):
            table = [[0] * self.n for _ in range(self.n)]
            for j in range(self.n):
                wanted = self._read_in(j, j + 1) & ~handed_on[j]
                for s in range(j, -1, -1):
                    wanted = self._before_block(s, wanted)
                    table[s][j] = wanted
            tables.append(table)
        with_it, without = tables
        for s in range(self.n):
            earlier = 0  # the phases before the last may find nothing
            for t in range(s, self.n):
                with_it[s][t] |= earlier
                earlier = without[s][t] = without[s][t] | earlier
        return tables

    def _before_block(self, block: int, wanted: int) -> int:
        for i in reversed(range(*self.borders[block : block + 2])):
            if self.writes[i] & wanted:
                wanted = wanted & ~self.writes[i] | self.reads[i]
        return wanted

    @cached_property
    def onset_bytes(self) -> list[int]:
        """Base bytes in use when the recomputations for each phase begin."""
        found = []
        for ops in self.phases:
            reading = [i for i in ops if self.reads[i]] or ops
            found.append(self.base_before[reading[0]] if reading else 0)
        return found

    @cached_property
    def forward_bytes(self) -> list[int]:
        """Base bytes while each block runs for the first time, workspace apart."""
        ops = self.graph.ops
        spans = [range(*self.borders[j : j + 2]) for j in range(self.n)]
        return [max(self.base[i] - ops[i].workspace_bytes for i in span) for span in spans]

    def closure(self, wanted: int, there: int) -> list[int]:
        """The forward ops, in order, that make `wanted` from what is `there`."""
        missing = wanted & ~there
        if not missing:
            return []
        ops = set()
        todo = list(members(missing))
        while todo:
            op = self.graph.producer[todo.pop()]
            if op not in ops:
                ops.add(op)
                todo.extend(members(self.reads[op] & ~there))
        return sorted(ops)

    def made_in(self, block: int, end: int) -> int:
        """The storages that the blocks from `block` to before `end` write."""
        made = 0
        for j in range(block, end):
            made |= self.made[j]
        return made

    def pass_over(self, block: int, end: int, keeps: int = 0) -> tuple[int, float]:
        """Peak bytes (give-up-able storages and workspace) and seconds of making what blocks hand on and keep."""
        stays = self.crossing[end] | keeps
        ops = self.closure(stays, self.crossing[block])
        return self._play([(i, True, 0) for i in ops], self.crossing[block], stays)

    def phase_costs(
        self, block: int, end: int, there: int, afresh: bool = False, stays: int | None = None
    ) -> tuple[int, float]:
        """Peak bytes (all) and recompute seconds of the phases of some blocks that begin with `there`.

        Args:
            afresh: drop after each backward op what was recomputed for it.
            stays: what is held throughout; by default all that exists and belongs to other blocks.
        """
        if stays is None:
            stays = there & ~self.made_in(block, end)
        runs = []
        have = there
        for phase in reversed(self.phases[block:end]):
            for i in phase:
                ops = self.closure(self.reads[i], have)
                runs += [(k, True, self.base_before[i]) for k in ops]
                runs.append((i, False, self.base[i]))
                have = there if afresh else have | self._made_by(ops)
        return self._play(runs, there, stays)

    def _play(self, runs: list[tuple[int, bool, int]], start: int, stays: int) -> tuple[int, float]:
        """Peak and recompute seconds of (op, again, base bytes) runs; storages die after their last reader."""
        ops = self.graph.ops
        steps = []
        read_later = stays
        for i, again, base in reversed(runs):
            born = self.writes[i] if again else 0
            touched = born | self.reads[i]
            dies = touched & ~read_later
            read_later = read_later & ~born | self.reads[i]
            steps.append((i, again, base, born, dies))
        live, live_bytes = start, self.bytes_of(start)
        peak, seconds = 0, 0.0
        for i, again, base, born, dies in reversed(steps):
            if born := born & ~live:
                live |= born
                live_bytes += self.bytes_of(born)
            in_use = base + live_bytes
            if again:
                seconds += ops[i].second.longer_seconds
                in_use += ops[i].second.workspace_bytes
                victim = ops[i].second.overwrites
                if victim >= 0 and dies >> victim & 1:
                    in_use -= self.nbytes[victim]
            peak = max(peak, in_use)
            if gone := live & dies:
                live ^= gone
                live_bytes -= self.bytes_of(gone)
        return peak, seconds

    def options(self, block: int) -> list[Option]:
        """For every span of blocks from `block` on, some sets to keep, from almost nothing to everything saved."""
        ends = [block + span for span in SPANS if block + span <= self.n]
        return [option for end in ends for option in self._options(block, end)]

    def _options(self, block: int, end: int) -> list[Option]:
        own = self.made_in(block, end) & self.saved
        handed_on = own & self.crossing[end]
        return [self._option(block, end, keeps) for keeps in dict.fromkeys(self._ladder(block, handed_on, own))]

    def _ladder(self, block: int, least: int, most: int) -> list[int]:
        """At most `MAX_OPTIONS` sets from `least` to `most`, each adding the storages that are dearest per byte."""
        start = self.crossing[block]
        worth = []
        for s in members(most & ~least):
            again = self.closure(1 << s, start | most & ~(1 << s))
            worth.append((sum(self.graph.ops[i].second.longer_seconds for i in again) / max(1, self.nbytes[s]), s))
        worth.sort(reverse=True)
        counts = sorted({round(k * len(worth) / (MAX_OPTIONS - 1)) for k in range(MAX_OPTIONS)})
        return [least | bits(s for _, s in worth[:count]) for count in counts]

    def _option(self, block: int, end: int, keeps: int) -> Option:
        needs = self._read_in(block, end) & ~keeps
        for j in reversed(range(block, end)):
            needs = self._before_block(j, needs)
        pass_peak, pass_seconds = self.pass_over(block, end, keeps)
        phase_peak, phase_seconds = self.phase_costs(block, end, keeps | needs)
        return Option(end, keeps, needs, pass_peak, pass_seconds, phase_seconds, phase_peak)

    def _read_in(self, block: int, end: int) -> int:
        read = 0
        for phase in self.phases[block:end]:
            for i in phase:
                read |= self.reads[i]
        return read


def _can_be_given_up(graph: StepGraph) -> frozenset[int]:
    allowance = SMALL_SHARE * sum(graph.storages[s].nbytes for s in graph.saved)
    small: set[int] = set()
    for s in sorted(graph.can_be_recomputed.intersection(graph.saved), key=lambda s: (graph.storages[s].nbytes, s)):
        allowance -= graph.storages[s].nbytes
        if allowance < 0:
            break
        small.add(s)
    return graph.can_be_recomputed - small


def bits(storages: Iterable[int]) -> int:
    """The set of these storages."""
    mask = 0
    for s in storages:
        mask |= 1 << s
    return mask


def members(mask: int) -> Iterator[int]:
    """The storages of a set, in order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def crossing_sets(graph: StepGraph) -> list[frozenset[int]]:
    """For every position 0..n_forward the activations that cross it."""
    crossing: list[frozenset[int]] = [frozenset()]
    alive: set[int] = set()
    for op in graph.ops[: graph.n_forward]:
        alive.update(s for s in op.writes if graph.storages[s].kind == "activation")
        alive = {s for s in alive if last_forward_reader(graph, s) > op.id}
        crossing.append(frozenset(alive))
    return crossing


def saved_bytes_per_op(graph: StepGraph) -> list[int]:
    """For every forward op the saved bytes it writes."""
    saved = set(graph.saved)
    return [sum(graph.storages[s].nbytes for s in op.writes if s in saved) for op in graph.ops[: graph.n_forward]]


def choose_cuts(graph: StepGraph, max_blocks: int) -> list[int]:
    """At most `max_blocks - 1` positions at which few bytes cross, spread evenly over the saved bytes.

    From all positions the worst is dropped until few enough are left: the one whose two neighbouring blocks save the
    fewest bytes together for the bytes that cross it. What crosses without being saved counts twice, as no backward op
    reads it.
    """
    saved = set(graph.saved)
    crossing = crossing_sets(graph)
    cost = [sum(graph.storages[s].nbytes * (1 if s in saved else 2) for s in across) for across in crossing]
    reached = [0]
    for nbytes in saved_bytes_per_op(graph):
        reached.append(reached[-1] + nbytes)
    # Only right after something worth holding; a batch norm's statistics are not.
    worth = WORTH_A_CUT * reached[-1] / graph.n_forward
    cuts = [p for p in range(1, graph.n_forward) if reached[p] - reached[p - 1] > worth]
    while len(cuts) > max_blocks - 1:
        borders = [0, *cuts, graph.n_forward]
        worst = min(
            range(1, len(borders) - 1),
            key=lambda i: (reached[borders[i + 1]] - reached[borders[i - 1]]) / (1 + cost[borders[i]]),
        )
        del cuts[worst - 1]
    return cuts
