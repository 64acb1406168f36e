"""A graph's share of the plan of several: its own residences, and the transfers that it starts or ends for others.

A copy to the host may end while a later graph runs, and the copy back may begin in the backward pass of another one. In
a share, ops and storages of other graphs are called "part+1.name", by how many forward passes later their graph runs.
The graph whose op a residence names does what it says. If that graph does not run, or has run already, the storage's
own graph does it: it waits for the copy to the host, and starts the copy back, where it needs the storage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.core.order import in_order_of
from shoal.core.residence import Encode, Keep, Offload, Recompute, Residence, exact_residence
from shoal.core.step import StepGraph

Other = tuple[int, str]  # how many forward passes later its graph runs, and the name of a storage of it
_OTHER = re.compile(r"part([+-]\d+)\.")


@dataclass(frozen=True)
class OtherTransfers:
    """What a graph and others do for each other's storages.

    Attributes:
        releases: own forward op → storages of others whose copies to the host must have ended after it.
        fetches: own backward op → storages of others whose copies back begin before it, in this order.
        released_by_others: own storages whose copies to the host end in the pass of another graph.
    """

    releases: Mapping[str, tuple[Other, ...]] = field(default_factory=dict)
    fetches: Mapping[str, tuple[Other, ...]] = field(default_factory=dict)
    released_by_others: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.releases or self.fetches)


NO_OTHERS = OtherTransfers()


def in_share(distance: int, name: str) -> str:
    """What an op or a storage is called in the share of a graph.

    >>> in_share(0, "relu"), in_share(-2, "relu")
    ('relu', 'part-2.relu')
    """
    return f"part{distance:+d}.{name}" if distance else name


def split_name(name: str) -> Other:
    """The inverse of `in_share`."""
    found = _OTHER.match(name)
    return (int(found[1]), name[found.end() :]) if found else (0, name)


@dataclass(frozen=True)
class Share:
    """How a graph runs by a plan of several.

    Attributes:
        residences: of its storages, and of those of others for which it starts or ends transfers; one that is absent is
            kept.
        order: of its ops; empty where they run as they were captured.
    """

    residences: Mapping[str, Residence] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    def in_order(self, graph: StepGraph) -> StepGraph:
        """The graph's own step with its ops in that order."""
        return in_order_of(graph, self.order) if self.order else graph

    def alone(self, graph: StepGraph) -> Share:
        """The same without other graphs: every transfer of its storages in its own passes.

        Args:
            graph: its step.
        """
        ops = self.in_order(graph).ops
        forward = [op.name for op in ops if op.phase == "forward"]
        backward = [op.name for op in ops if op.phase == "backward"]

        def own(residence: Residence) -> Residence:
            if isinstance(residence, Encode):
                exact = own(residence.exact)
                assert isinstance(exact, Keep | Recompute | Offload)
                return replace(residence, exact=exact)
            if not isinstance(residence, Offload):
                return residence
            free_after = forward[-1] if split_name(residence.free_after)[0] else residence.free_after
            return Offload(free_after, backward[0] if split_name(residence.fetch_before)[0] else residence.fetch_before)

        residences = {name: own(one) for name, one in self.residences.items() if not split_name(name)[0]}
        return replace(self, residences=residences)


def other_transfers(share: Share) -> OtherTransfers:
    """What a graph and others do for each other's storages under its share."""
    releases, fetches = dict[str, list[Other]](), dict[str, list[Other]]()
    released_by_others = set()
    for name, residence in share.residences.items():
        exact = exact_residence(residence)
        if not isinstance(exact, Offload):
            continue
        other = split_name(name)
        (leaves_at, leaves), (returns_at, returns) = split_name(exact.free_after), split_name(exact.fetch_before)
        if not other[0] and leaves_at:
            released_by_others.add(name)
        if other[0] and not leaves_at:
            releases.setdefault(leaves, []).append(other)
        if other[0] and not returns_at:
            fetches.setdefault(returns, []).append(other)
    return OtherTransfers(
        {op: tuple(others) for op, others in releases.items()},
        {op: tuple(others) for op, others in fetches.items()},
        frozenset(released_by_others),
    )
