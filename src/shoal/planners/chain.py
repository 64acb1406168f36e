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
every distinct plan on it is played by the exact simulator, next to the evenly cut ones of `sqrt`, and a budget gets the
fastest of those that truly fit. What is considered in one table does not depend on the budget: of plans that fit with
few blocks, more bytes never give a slower one.

It meets Revolve's counts on equal layers, and on chains of convolutions, up to the width of a slot, no choice of what
to keep and what to compute once more is better; the tests compare with every one.

Not yet good: a storage held from the forward pass on is held until its last reader, even where giving it up and
computing it once more would pay; blocks have few options, ordered by seconds per byte only; small storages are always
kept; long skips (U-Net) make wide cuts whose storages the model holds longer than need be. It has no lower bound.
"""

from __future__ import annotations

import time
from functools import lru_cache

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.residence import Keep, Recompute, Residence
from shoal.core.step import StepGraph
from shoal.planners.chain_blocks import Blocks, members
from shoal.planners.chain_table import ChainTable, Held
from shoal.planners.cuts import choose_cuts, evenly_cut, keep_everything
from shoal.planners.infeasible import infeasible
from shoal.planners.simulated import Simulated, simulated

# The table grows with the cube of the blocks. With 60 the smallest peaks of two residual steps of some 60 ops were 3
# and 12 % lower than with 30; plans of five networks at a quarter of the way to plain PyTorch's peak were not faster.
MAX_BLOCKS = 30
MAX_BLOCKS_OF_SMALLEST = 60
SLOTS = 400


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
    everything = keep_everything(graph)
    found = [everything, *evenly_cut(graph)]
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
