"""A step in compiled regions: which of them there are is measured, region by region, against the ops one by one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.captured import Captured
from shoal.capture.regions import Draft, Regional, drafted, in_regions
from shoal.core.plan import Plan
from shoal.cost.measurement_cache import recall, remember
from shoal.cost.profile import Costs, profile, recalled
from shoal.graph.op_counts import signature
from shoal.kernels.compiled_region import CompiledRegion, compile_regions
from shoal.lowlevel.inductor_region import missing_compiler
from shoal.memory.limit import no_memory_limit

log = logging.getLogger("shoal")
_OPERANDS = "regions"  # the cache of what may be written over
_SLOWER = 1.0  # a region stays where it takes at most as long as its ops
_HOPELESS = 1.25  # regions of one sort are not compiled where the largest takes so much longer than its ops


def in_compiled_regions(captured: Captured, plan: Plan | None = None) -> Captured:
    """The step in the regions that are faster compiled than as ops one by one, each compiled.

    Args:
        captured: the step, to be run on this machine.
        plan: one that was made for it: what it has as ops of their own stays so, and nothing is measured.
    """
    device = captured.device
    if reason := missing_compiler(device.type):
        _say_once(device.type, reason)
        return _with_notes(captured, (f"nothing: {reason}",))
    with no_memory_limit(), unset_fake_temporarily():
        if plan is not None:
            return _described(in_regions(captured, {op.name for op in plan.captured_graph.ops}), {})
        return _fastest(captured, device)


def in_unmeasured_regions(captured: Captured) -> Captured:
    """The step in all regions that it may have, none of them compiled: for a machine that is not here."""
    return _described(drafted(captured).read(), {})


def _fastest(captured: Captured, device: torch.device) -> Captured:
    left_out: set[str] = set()
    failures: dict[str, str] = {}
    alone = profile(captured.distinct_nodes(), device=device)
    while True:  # what loses is taken apart, which may change its neighbours
        draft = drafted(captured, left_out)
        lost = _losing(draft, alone, device)
        if not lost:  # times may be of an earlier process
            compile_regions(draft.regions.values())
            lost = {op for name, region in draft.regions.items() if region.failure for op in draft.members[name]}
        failures |= {region.words: region.failure for region in draft.regions.values() if region.failure}
        if not lost:
            break
        left_out |= lost
    regional = draft.compiled()
    _remember_operands(regional.regions.values(), device)
    return _described(regional, failures)


@dataclass(frozen=True)
class _RegionUnit:
    """Regions that stay or go together: they share an op, as those of a batch norm do.

    Attributes:
        nodes: of the regions.
        members: names of the ops that they are made of.
        seconds: which these take one by one.
    """

    nodes: tuple[fx.Node, ...]
    members: frozenset[str]
    seconds: float

    @property
    def sort(self) -> tuple[str, ...]:
        return tuple(sorted(_region(node).sort for node in self.nodes))

    def slower(self, joined: Mapping[str, float]) -> float:
        """How much longer the regions take than their ops; infinite where one cannot run."""
        times = [math.inf if _region(node).failure else joined.get(signature(node), math.inf) for node in self.nodes]
        return sum(times) / self.seconds if self.seconds else math.inf


def _region(node: fx.Node) -> CompiledRegion:
    region: Any = node.target
    return region


def _losing(draft: Draft, alone: Costs, device: torch.device) -> set[str]:
    """Ops of the regions that take longer than these; of many regions of one sort the largest may speak for all.

    On CUDA that is time on the device. By itself a region takes the host longer to launch than its ops by themselves;
    in the step of ResNet-50 on an H100, the one that was measured, it took the host less.
    """
    _recall_operands(draft.regions.values(), device)
    each = alone.seconds
    sorts: dict[tuple[str, ...], list[_RegionUnit]] = {}
    for names in _together(draft.members):
        members = frozenset(op for name in names for op in draft.members[name])
        seconds = sum(each.get(signature(draft.of.node_of[op]), 0.0) for op in members)
        unit = _RegionUnit(tuple(draft.nodes[name] for name in sorted(names)), members, seconds)
        sorts.setdefault(unit.sort, []).append(unit)
    largest = {sort: max(units, key=lambda unit: unit.seconds) for sort, units in sorts.items()}
    joined = _costs(largest.values(), device).seconds
    hopeless = {sort for sort, unit in largest.items() if unit.slower(joined) > _HOPELESS * _SLOWER}
    joined = _costs([unit for sort, units in sorts.items() if sort not in hopeless for unit in units], device).seconds
    lost: set[str] = set()
    for sort, units in sorts.items():
        for unit in units:
            if sort in hopeless or unit.slower(joined) > _SLOWER:
                lost |= unit.members
    return lost


def _costs(units: Iterable[_RegionUnit], device: torch.device) -> Costs:
    """What the regions take, by signature; those that were never timed are compiled, and timed."""
    nodes = {signature(node): node for unit in units for node in unit.nodes}
    known = recalled(nodes, device=device).seconds
    unknown = [_region(node) for key, node in nodes.items() if key not in known or _region(node).overwritable is None]
    compile_regions(unknown)
    _remember_operands(unknown, device)
    working = {key: node for key, node in nodes.items() if not _region(node).failure}
    return profile(working, device=device)


def _recall_operands(regions: Iterable[CompiledRegion], device: torch.device) -> None:
    """Which operands may be written over was found out by an earlier process on this machine."""
    regions = list(regions)
    known = recall(_OPERANDS, device, [region.digest for region in regions])
    for region in regions:
        places = known.get(region.digest)
        if region.overwritable is None and isinstance(places, list) and all(isinstance(one, int) for one in places):
            region.overwritable = tuple(places)


def _remember_operands(regions: Iterable[CompiledRegion], device: torch.device) -> None:
    found = {r.digest: list(r.overwritable) for r in regions if r.overwritable is not None and not r.failure}
    known = recall(_OPERANDS, device, found)
    if new := {digest: places for digest, places in found.items() if digest not in known}:
        remember(_OPERANDS, device, new)


def _together(members: Mapping[str, tuple[str, ...]]) -> Iterable[set[str]]:
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
    said = [f"{n_regions} regions of {n_ops} ops, {n_distinct} of them different"]
    if not n_regions:
        said = ["nothing: no chain of ops is faster compiled"]
    said += [f"not {words}: {reason}; run one by one" for words, reason in failures.items()]
    return _with_notes(regional.captured, tuple(said))


def _with_notes(captured: Captured, notes: tuple[str, ...]) -> Captured:
    return replace(captured, read_with=replace(captured.read_with, compiled=notes))


@lru_cache
def _say_once(device_type: str, reason: str) -> None:
    log.warning(
        "kernels='compiled': nothing is compiled on %s, PyTorch's kernels run one by one: %s", device_type, reason
    )
