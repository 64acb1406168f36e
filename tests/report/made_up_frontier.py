"""A small frontier with one point of each variant of a step."""

from __future__ import annotations

from shoal.core.frontier import BatchPoint, FrontierPoint, Storages
from shoal.core.variant import WHOLE, Variant
from shoal.engine.frontier import BatchFrontier, Frontier


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


def made_up_batches(model: str = "resnet18") -> BatchFrontier:
    """Five batches of which the fourth is the best and plain PyTorch has room for three; 65 do not fit, nor does 1."""
    fused = Variant(fuse="bnff")
    told = [
        (2, 0.02, 0.02, 200, WHOLE, 0.02),
        (16, 0.09, 0.085, 500, WHOLE, 0.09),
        (32, 0.17, 0.16, 1000, WHOLE, 0.17),
        (48, 0.24, 0.23, 1000, fused, 0.25),
        (64, 0.4, 0.3, 990, Variant(depth=0.5, grid=(2, 2)), 0.33),
    ]
    none = Storages(0, 0)
    points = tuple(
        BatchPoint(
            1000, peak, seconds, bound, variant, Storages(2, 300), Storages(1, 100) if batch > 32 else none, none,
            none, batch, plain_seconds, 30 * batch,
        )
        for batch, seconds, bound, peak, variant, plain_seconds in told
    )  # fmt: skip
    unfit = ((1, "too <few>"), (65, "needs 1.000 KiB"), (128, "needs 2.000 KiB"))
    return BatchFrontier(model, "p100-nvlink", ("fuse", "recompute"), 1000, points, unfit, 1.5)
