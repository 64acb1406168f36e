"""Stochastic Split-CNN (Jin and Hong, ASPLOS'19, section 3.3): cuts drawn again for every mini-batch.

The i-th of N patches of the joined tensor, the output split scheme of L rows, ends at a row drawn uniformly from
ceil((i - omega) * L / N) to floor((i + omega) * L / N). Cuts of earlier tensors follow from it. Rows that would leave a
patch too small for its layers (`patch_sizes`) are moved to the nearest one that does not. If there is no row in that
interval, the even cut is taken.

A step that is compiled takes its cuts as sizes of tensors without elements, so that one compiled step serves every
draw: the sizes are symbols there, each with its minimum and maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shoal.transforms.split.patch_sizes import Measuring, all_min_rows
from shoal.transforms.split.split_plan import SplitPlan

Cuts = tuple[tuple[int, ...], ...]  # inner cuts of the joined tensor, along each dimension

Carrier = int | tuple[torch.Tensor, int, int]

_NONE = Measuring()

_OFF_ZERO = 2  # compilers take sizes of 0 and 1 for constants


def draw(plan: SplitPlan, sizes: Sequence[int], omega: float, measuring: Measuring = _NONE) -> Cuts:
    """Cuts for one mini-batch, from torch's global generator of the CPU.

    Args:
        plan: how the network is split.
        sizes: of its input.
        omega: at least 0, less than 0.5.
        measuring: batch norms to which a patch of one element is nothing.

    Raises:
        InputError: the input is too small for the grid.
    """
    return _cuts(plan, sizes, omega, measuring, lambda low, high: int(torch.randint(low, high + 1, ())))


def limits(plan: SplitPlan, sizes: Sequence[int], omega: float, measuring: Measuring = _NONE) -> tuple[Cuts, Cuts]:
    """The minimum and the maximum of every cut; as for `draw`."""
    low = _cuts(plan, sizes, omega, measuring, lambda low, high: low)
    return low, _cuts(plan, sizes, omega, measuring, lambda low, high: high)


def as_sizes(cuts: Cuts, low: Cuts, high: Cuts) -> tuple[tuple[Carrier, ...], ...]:
    """Cuts as a compiled step takes them: each the size of a tensor without elements and the bounds of that size.

    Where nothing can be drawn it is an int.
    """
    per_dim = zip(cuts, low, high, strict=True)
    return tuple(tuple(_as_size(*three) for three in zip(*one, strict=True)) for one in per_dim)


def from_sizes(carriers: Sequence[Sequence[Carrier]]) -> Cuts:
    """The inverse of `as_sizes`. A compiler learns the bounds from it."""
    return tuple(tuple(one if isinstance(one, int) else _from_size(*one) for one in along) for along in carriers)


def _as_size(cut: int, low: int, high: int) -> Carrier:
    if low == high:
        return cut
    carrier = torch.empty(0, cut + _OFF_ZERO)
    torch._dynamo.mark_dynamic(carrier, 1)
    return carrier, low + _OFF_ZERO, high + _OFF_ZERO


def _from_size(carrier: torch.Tensor, low: int, high: int) -> int:
    size = carrier.shape[1]
    torch._check(size >= low)
    torch._check(size <= high)
    return size - _OFF_ZERO


def _cuts(
    plan: SplitPlan, sizes: Sequence[int], omega: float, measuring: Measuring, choose: Callable[[int, int], int]
) -> Cuts:
    even, rows = plan.even_cuts(sizes), all_min_rows(plan, sizes, measuring)
    found = []
    for dim, (parts, length) in enumerate(zip(plan.grid, plan.joined(sizes), strict=True)):
        cuts: list[int] = []
        for i in range(1, parts):
            low, high = math.ceil((i - omega) * length / parts), math.floor((i + omega) * length / parts)
            row = choose(low, high) if low <= high else even[dim][i - 1]
            first, last = (cuts[-1] if cuts else 0) + rows[dim][i - 1], length - sum(rows[dim][i:])
            cuts.append(min(max(row, first), last))
        found.append(tuple(cuts))
    return tuple(found)
