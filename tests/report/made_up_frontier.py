"""A small frontier with one point of each form of a step."""

from __future__ import annotations

from shoal.core.frontier import FrontierPoint, Storages
from shoal.core.variant import WHOLE, Variant
from shoal.engine.frontier import Frontier


def made_up_frontier(model: str = "resnet18") -> Frontier:
    """Four points: two of the step as it is, one on patches, one with batch norm fused, faster than plain PyTorch."""
    patches = Variant(depth=0.5, grid=(2, 2))
    told = [
        (400, 390, 0.015, 0.012, WHOLE, 1, 2),
        (600, 600, 0.0125, 0.011, patches, 2, 1),
        (800, 790, 0.011, 0.0105, WHOLE, 3, 1),
        (1000, 900, 0.009, 0.009, Variant(fuse="bnff"), 4, 0),
    ]
    none = Storages(0, 0)
    points = tuple(
        FrontierPoint(
            budget, peak, seconds, bound, variant, Storages(kept, 100 * kept), Storages(again, 150 * again), none, none
        )
        for budget, peak, seconds, bound, variant, kept, again in told
    )
    left_out = (("75 % of the convolutions", "too <small>"),)
    return Frontier(model, "p100-nvlink", ("fuse", "recompute"), points, 0.01, 1000, 700, left_out, 1.5)
