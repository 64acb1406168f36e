"""From what is held in each phase of the backward pass to residences: walk through it and note what must come back."""

from __future__ import annotations

from shoal.core.residence import Keep, Recompute, Residence
from shoal.planners.chain_blocks import Blocks, members
from shoal.planners.chain_table import Held


def residences_of(blocks: Blocks, plan: Held) -> dict[str, Residence]:
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
