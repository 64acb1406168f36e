"""The search of csrc/layout.cpp in Python, name by name, for where it was not built: a thousand times as slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.memory.layout.problem import Block
from shoal.memory.layout.rules import Outcome, Rules

_DONE, _NONE = -1, -2  # in place of a task
_SLACK_SHARE = 0.01  # of the capacity, added to the bytes left over in a section


def attempt(
    blocks: Sequence[Block], capacity_bytes: int, rules: Rules, nodes: int, seconds: float, failures: list[int]
) -> tuple[Outcome, list[int]]:
    """One attempt at a layout.

    Args:
        blocks: none of 0 bytes; among those that can lie equally low the first is tried first.
        capacity_bytes: no byte at or past it is used.
        rules: to go by.
        nodes, seconds: after which to give up.
        failures: of each section of time, as many as blocks at most; what fails here is added.

    Returns:
        How it ended, and an offset for each block if a layout was found.
    """
    deadline = time.perf_counter() + seconds
    searching = _Search(blocks, capacity_bytes, rules, nodes, deadline, failures)
    outcome = searching.run()
    return outcome, [room.least for room in searching.room]


@dataclass(frozen=True)
class _Item:
    first: int  # section of time
    last: int  # excluded
    size: int


class _Room(NamedTuple):
    floor: int  # upon the placed blocks
    least: int  # offset that is not ruled out; a block is raised when it is above its floor
    most: int


class _Task(NamedTuple):
    items: list[int]  # unplaced, ascending by their first section
    then: int  # the task that follows
    choices: int  # made before it


class _Choice(NamedTuple):
    item: int
    task: int
    may_be_raised: bool
    changes: int  # made before it, as the next three
    slacks: int
    order: int
    tasks: int


def _items(blocks: Sequence[Block]) -> list[_Item]:
    """Sections are times that share their blocks with no other: one begins with a block, after one has ended."""
    events = sorted(
        (moment, begins, i)
        for i, block in enumerate(blocks)
        for moment, begins in ((block.lower, True), (block.upper, False))
    )
    first, last = [0] * len(blocks), [0] * len(blocks)
    section, ended = -1, True
    for _, begins, i in events:
        if begins and ended:
            section += 1
        ended = not begins
        if begins:
            first[i] = section
        else:
            last[i] = section + 1
    return [_Item(first[i], last[i], block.size_bytes) for i, block in enumerate(blocks)]


class _Search:
    def __init__(
        self,
        blocks: Sequence[Block],
        capacity: int,
        rules: Rules,
        most_nodes: int,
        deadline: float,
        failures: list[int],
    ) -> None:
        self.items = _items(blocks)
        self.capacity = capacity
        self.rules = rules
        self.most_nodes = most_nodes
        self.deadline = deadline
        self.failures = failures
        sections = max((item.last for item in self.items), default=0)
        self.room = [_Room(0, 0, capacity - item.size) for item in self.items]
        self.placed = [False] * len(blocks)
        self.meets = [
            [j for j, other in enumerate(self.items) if i != j and one.first < other.last and other.first < one.last]
            for i, one in enumerate(self.items)
        ]
        self.members: list[list[int]] = [[] for _ in range(sections)]
        for i, item in enumerate(self.items):
            for s in range(item.first, item.last):
                self.members[s].append(i)
        self.slack = [capacity] * sections
        self.changed: list[int] = []
        self.pending: list[int] = []
        self.changes: list[tuple[int, _Room]] = []
        self.slacks: list[tuple[int, int]] = []
        self.order: list[int] = []
        self.choices: list[_Choice] = []
        self.tasks: list[_Task] = []

    def run(self) -> Outcome:
        every = sorted(range(len(self.items)), key=lambda i: self.items[i].first)
        for i in every:
            self._look_at_sections_of(i)
        task = self._split(every, _DONE) if self._infer(every) else _NONE
        nodes = 0
        while task >= 0:
            del self.choices[self.tasks[task].choices :]  # of parts that are done: they stand
            nodes += 1
            if nodes > self.most_nodes or time.perf_counter() > self.deadline:
                return Outcome.GAVE_UP
            following = self._choose(self.tasks[task].items)
            may_be_raised = self._can_stand_on_another(following)
            marks = len(self.changes), len(self.slacks), len(self.order), len(self.tasks)
            self.choices.append(_Choice(following, task, may_be_raised, *marks))
            others = [i for i in self.tasks[task].items if i != following]
            if self._place(following) and self._infer(others):
                task = self._split(others, self.tasks[task].then)
            else:
                task = self._go_back()
        return Outcome.FOUND if task == _DONE else Outcome.IMPOSSIBLE

    def _split(self, items: Sequence[int], then: int) -> int:
        parts: list[list[int]] = []
        end = 0
        for i in items:
            if not parts or (self.items[i].first >= end and Rules.PARTS in self.rules):
                parts.append([])
            parts[-1].append(i)
            end = max(end, self.items[i].last)
        for part in sorted(parts, key=lambda part: -len(part)):
            self.tasks.append(_Task(part, then, len(self.choices)))
            then = len(self.tasks) - 1
        return then

    def _go_back(self) -> int:
        while self.choices:
            last = self.choices.pop()
            for i in self.order[last.order :]:
                self.placed[i] = False
            del self.order[last.order :]
            for i, room in reversed(self.changes[last.changes :]):
                self.room[i] = room
            del self.changes[last.changes :]
            for s, slack in reversed(self.slacks[last.slacks :]):
                self.slack[s] = slack
            del self.slacks[last.slacks :]
            del self.tasks[last.tasks :]
            above_floor = self.room[last.item].floor + 1
            if (
                last.may_be_raised
                and self._raise(last.item, above_floor, self.items[last.item].first)
                and self._infer(self.tasks[last.task].items)
            ):
                return last.task
        return _NONE

    def _choose(self, items: Sequence[int]) -> int:
        def score(s: int) -> float:
            failures = self.failures[s] if Rules.FAILURES in self.rules else 0
            return (failures + 1) / (self.slack[s] + _SLACK_SHARE * self.capacity)

        end = max(self.items[i].last for i in items)
        sections = range(self.items[items[0]].first, end)
        section = max((s for s in sections if self.slack[s] < self.capacity), key=score)  # not those all placed
        height = lambda i: (self.room[i].least, i)  # noqa: E731
        lowest = min((i for i in self.members[section] if not self.placed[i]), key=height)
        while True:
            least = self.room[lowest].least
            below = [j for j in self._beside(lowest) if self.room[j].least + self.items[j].size <= least]
            if not below:
                return lowest
            lowest = min(below, key=height)

    def _infer(self, items: Sequence[int]) -> bool:
        while True:
            if self.changed:
                i = self.changed.pop()
                self._look_at_sections_of(i)
                possible = self._order_pairs(i)
            elif self.pending:
                possible = self._pack(self.pending.pop())
            else:
                possible = self._support(items)
                if possible and not self.changed:
                    return True
            if not possible:
                return False

    def _pack(self, s: int) -> bool:
        self.members[s].sort(key=lambda i: -self.room[i].least)
        here = [i for i in self.members[s] if not self.placed[i]]
        below: list[bool] = []
        total = height = 0
        slack = self.capacity
        for i in here:
            size = self.items[i].size
            total += size
            slack = min(slack, self.capacity - self.room[i].least - total)
            if slack < 0:
                return self._failed(s)
            below.append(Rules.LOWEST in self.rules and bool(below) and height + total > self.capacity)
            if below[-1] and not self._lower(i, self.capacity - total, s):
                return False
            height = self.room[i].least
        height = 0
        for i, is_below in zip(reversed(here), reversed(below), strict=True):
            if not self._raise(i, height, s):
                return False
            if is_below:
                height = max(height, self.room[i].least + self.items[i].size)
        if slack != self.slack[s]:
            self.slacks.append((s, self.slack[s]))
            self.slack[s] = slack
        return True

    def _order_pairs(self, i: int) -> bool:
        if Rules.PAIR not in self.rules:
            return True
        for j in self._beside(i):
            if self.room[i].least + self.items[i].size > self.room[j].most and not self._put_below(j, i):
                return False
            if self.room[j].least + self.items[j].size > self.room[i].most and not self._put_below(i, j):
                return False
        return True

    def _put_below(self, i: int, j: int) -> bool:
        s = max(self.items[i].first, self.items[j].first)
        above, below = self.room[i].least + self.items[i].size, self.room[j].most - self.items[i].size
        return self._raise(j, above, s) and self._lower(i, below, s)

    def _support(self, items: Sequence[int]) -> bool:
        raised = []
        supported: dict[int, int] = {}
        for i in items:
            if self.room[i].least == self.room[i].floor:
                supported[i] = self.room[i].least
            elif self._can_stand_on_another(i):
                raised.append(i)
            else:
                return self._failed(self.items[i].first)
        is_changed = True
        while is_changed:
            is_changed = False
            for i in raised:
                tops = [supported[j] + self.items[j].size for j in self._beside(i) if j in supported]
                if tops:
                    lowest = max(min(tops), self.room[i].least)
                    if i not in supported or lowest < supported[i]:
                        supported[i] = lowest
                        is_changed = True
        for i in raised:
            nowhere = self.room[i].most + 1
            if not self._raise(i, supported.get(i, nowhere), self.items[i].first):
                return False
        return True

    def _can_stand_on_another(self, i: int) -> bool:
        if Rules.GAP not in self.rules:
            return True
        top = self.room[i].floor + self.items[i].size
        return any(self.room[j].least < top for j in self._beside(i))

    def _raise(self, i: int, least: int, section: int) -> bool:
        if least <= self.room[i].least:
            return True
        if least > self.room[i].most:
            return self._failed(section)
        self._change(i, self.room[i]._replace(least=least))
        return True

    def _lower(self, i: int, most: int, section: int) -> bool:
        if most >= self.room[i].most:
            return True
        if most < self.room[i].least:
            return self._failed(section)
        self._change(i, self.room[i]._replace(most=most))
        return True

    def _change(self, i: int, room: _Room) -> None:
        self.changes.append((i, self.room[i]))
        self.room[i] = room
        if i not in self.changed:
            self.changed.append(i)

    def _failed(self, section: int) -> bool:
        self.failures[section] += 1
        self.changed.clear()
        self.pending.clear()
        return False

    def _look_at_sections_of(self, i: int) -> None:
        for s in range(self.items[i].first, self.items[i].last):
            if s not in self.pending:
                self.pending.append(s)

    def _place(self, i: int) -> bool:
        self.placed[i] = True
        self.order.append(i)
        self._look_at_sections_of(i)
        top = self.room[i].floor + self.items[i].size
        for j in self._beside(i):
            room = self.room[j]
            if room.floor >= top:
                continue
            if top > room.most:
                return self._failed(max(self.items[i].first, self.items[j].first))
            self._change(j, room._replace(floor=top, least=max(room.least, top)))
        return True

    def _beside(self, i: int) -> list[int]:
        """Unplaced blocks that share a time with it."""
        return [j for j in self.meets[i] if not self.placed[j]]
