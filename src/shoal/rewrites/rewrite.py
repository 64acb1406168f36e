"""A rewrite: where it applies in the joint graph of a step, what it changes there, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from shoal.errors import PlanError
from shoal.graph.joint import Joint

Guarantee = Literal["bitwise", "exact", "lossy"]


@dataclass(frozen=True)
class Rewrite:
    """One row of the table.

    Attributes:
        name: what it does, in a few words.
        match: yields its sites in a joint graph. Each is changed before the next one is asked for.
        apply: changes one site.
        technique: what has to ask for it: a word of `allow=`, or "compact" for what saves bytes only while the backward
            pass runs; "" for what is done to every step.
        guarantee: "bitwise" for PyTorch's own bits, "exact" for the same function to rounding, "lossy" otherwise.
        by_choice: its sites are nodes, and only those are changed that a plan names.
    """

    name: str
    match: Callable[[Joint], Iterable[Any]]
    apply: Callable[[Joint, Any], None]
    technique: str = ""
    guarantee: Guarantee = "bitwise"
    by_choice: bool = False


def rewrite(joint: Joint, table: Sequence[Rewrite], technique: str = "", chosen: Collection[str] = ()) -> int:
    """Apply the rows of a table that belong to a technique, in order.

    Args:
        joint: what is rewritten.
        table: the rows.
        technique: as of `Rewrite`.
        chosen: names of the nodes that a plan names, for rows that are `by_choice`.

    Returns:
        The number of sites.

    Raises:
        PlanError: a node that the plan names is no site.
    """
    n_sites, left = 0, dict.fromkeys(chosen)
    for row in table:
        for site in row.match(joint) if row.technique == technique else ():
            if row.by_choice and left.pop(site.name, site) is not None:
                continue
            row.apply(joint, site)
            n_sites += 1
    for name in left:
        raise PlanError(f"the plan changes {name!r} ({technique}), which cannot be here; plan this step again")
    return n_sites


def call_instead(joint: Joint, site: tuple[fx.Node, Any, tuple[Any, ...]]) -> None:
    """`apply` of a rewrite whose sites are a node, and what it calls instead, with which arguments."""
    node, target, arguments = site
    node.target, node.args = target, arguments
