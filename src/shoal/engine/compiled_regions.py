"""A step in compiled regions: which of them there are is measured, region by region, against the ops one by one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.op_counts import signature
from shoal.capture.regions import Regional, in_regions
from shoal.core.plan import Plan
from shoal.cost.profile import Costs, profile
from shoal.lowlevel.inductor_region import missing_compiler
from shoal.memory.limit import no_memory_limit

log = logging.getLogger("shoal")
_ROUNDS = 3  # in each, regions that lose are taken apart, which may change their neighbours
_SLOWER = 1.0  # a region stays where it takes at most as long as its ops


def in_compiled_regions(captured: Captured, plan: Plan | None = None) -> Captured:
    """The step in the regions that are faster compiled than as ops one by one, each compiled.

    Args:
        captured: the step, to be run on this machine.
        plan: one that was made for it: what it has as ops of their own stays so, and nothing is measured.
    """
    device = captured.device
    if device.type not in ("cpu", "cuda") or captured.largest_nodes:
        return captured
    if reason := missing_compiler(device.type):
        _say_once(device.type, reason)
        return _with_notes(captured, (f"nothing: {reason}",))
    with no_memory_limit(), unset_fake_temporarily():
        if plan is not None:
            return _described(in_regions(captured, {op.name for op in plan.captured_graph.ops}), {})
        return _fastest(captured, device)


def _fastest(captured: Captured, device: torch.device) -> Captured:
    left_out: set[str] = set()
    failures: dict[str, str] = {}
    alone = profile(captured.distinct_nodes(), device=device)
    for _ in range(_ROUNDS):
        regional = in_regions(captured, left_out)
        failed = {name for name, region in regional.regions.items() if region.failure}
        failures |= {regional.regions[name].words: regional.regions[name].failure for name in failed}
        working = {name: node for name, node in regional.captured.node_of.items() if name in regional.regions}
        working = {name: node for name, node in working.items() if name not in failed}
        joined = profile({signature(node): node for node in working.values()}, device=device)
        lost = {op for name in failed for op in regional.members[name]}
        lost |= _slower(captured, regional, working, alone, joined)
        if not lost:
            break
        left_out |= lost
    else:
        regional = in_regions(captured, left_out)
    return _described(regional, failures)


def _slower(captured: Captured, regional: Regional, working: Collection[str], alone: Costs, joined: Costs) -> set[str]:
    """Ops of the regions that take longer than these; regions that share an op, as a batch norm's, stand together."""
    lost: set[str] = set()
    for names in _together({name: regional.members[name] for name in working}):
        members = {op for name in names for op in regional.members[name]}
        nodes = [regional.captured.node_of[name] for name in names]
        times = [joined.seconds.get(signature(node)) for node in nodes]
        before = [alone.seconds.get(signature(captured.node_of[op]), 0.0) for op in members]
        if None in times or sum(filter(None, times)) > _SLOWER * sum(before):
            lost |= members
    return lost


def _together(members: dict[str, tuple[str, ...]]) -> Iterable[set[str]]:
    groups: list[tuple[set[str], set[str]]] = []
    for name, ops in members.items():
        names, own = {name}, set(ops)
        apart = []
        for other_names, other_ops in groups:
            if own & other_ops:
                names |= other_names
                own |= other_ops
            else:
                apart.append((other_names, other_ops))
        groups = [*apart, (names, own)]
    return [names for names, _ in groups]


def _described(regional: Regional, failures: dict[str, str]) -> Captured:
    n_regions, n_distinct = len(regional.regions), len(set(regional.regions.values()))
    n_ops = sum(len(ops) for ops in regional.members.values())
    said = [f"{n_regions} regions of {n_ops} ops, {n_distinct} of them different"] if n_regions else []
    said += [f"not {words}: {reason}; run one by one" for words, reason in failures.items()]
    return _with_notes(regional.captured, tuple(said))


def _with_notes(captured: Captured, notes: tuple[str, ...]) -> Captured:
    return replace(captured, read_with=replace(captured.read_with, compiled=notes))


@lru_cache
def _say_once(device_type: str, reason: str) -> None:
    log.warning(
        "kernels='compiled': nothing is compiled on %s, PyTorch's kernels run one by one: %s", device_type, reason
    )
