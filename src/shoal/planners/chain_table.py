"""The dynamic program over a chain of blocks, for every amount of memory at once.

`seconds[w, s, t, m]` is the least recomputation that carries out the phases t, t-1, ..., s of the backward pass inside
m slots of memory, when phase t is about to begin and what the phases need of the blocks before s is in memory (and not
counted in m). With w = 0 what block t handed to block t+1 is in memory, too (and counted); with w = 1 it is not.
There are four ways on:

- hold r: run the blocks s..r-1, hold only what the blocks from r on start from, carry out r..t, then s..r-1, either
  with what block r-1 handed on (held meanwhile) or without;
- keep o: run some blocks s..r-1 and keep what option o says, carry out r..t, then s..r-1 with the kept storages,
  recomputing the others as late as they are read;
- reach t: run all blocks s..t-1, hold nothing, carry out phase t only, then s..t-1 from the start again;
- leaf: s = t, carry out the phase, recomputing what it reads as late as it reads it.

For t = n-1 the blocks run in the forward pass itself, which costs nothing extra and meets smaller base bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.planners.chain_blocks import Blocks, Option

WITH, WITHOUT = 0, 1  # what the last block handed on


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
