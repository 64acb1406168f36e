"""How small a patch may be: layers that a smaller one would stop, and the cuts that leave every patch large enough.

A layer that mirrors its input at the border needs one row more than it mirrors, and a batch norm that normalises each
patch by itself two elements a channel. All else needs one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shoal.errors import InputError
from shoal.transforms.split.patches import Region, at, border_padding
from shoal.transforms.split.split_plan import SplitPlan


@dataclass(frozen=True)
class Measuring:
    """The batch norms that take statistics of each patch of one image, by the numbers of their steps.

    With more than one image every channel of a patch has two elements, and none is named here.
    """

    steps: tuple[int, ...] = ()


def check_patches(plan: SplitPlan, sizes: Sequence[int], regions: Sequence[Region], measuring: Measuring) -> None:
    """Whether every layer can run on its patches.

    Args:
        plan: how the network is split.
        sizes: of its input.
        regions: what the patches of every tensor cover.
        measuring: batch norms to which a patch of one element is nothing.

    Raises:
        InputError: it is too small for a layer, which is named.
    """
    for number, step in enumerate(plan.steps):
        source, made = regions[step.inputs[0]], regions[number + 1]
        if step.mirrors and step.windows is not None:
            for patch in plan.patches:
                pads = border_padding(step.windows, source, made, patch)
                for (begin, end), pad in zip(at(source, patch), pads, strict=True):
                    if max(pad) >= end - begin:
                        raise InputError(
                            f"{step.name} mirrors {max(pad)} rows and a patch has {end - begin} for grid={plan.grid}; "
                            "give fewer patches or a larger input",
                            details={"its input": _times(plan.lengths(sizes)[step.inputs[0]])},
                        )
        if number in measuring.steps:
            for patch in plan.patches:
                if prod(end - begin for begin, end in at(source, patch)) == 1:
                    raise _one_element(plan, sizes, number)


def min_rows(plan: SplitPlan, sizes: Sequence[int], dim: int, measuring: Measuring) -> list[int]:
    """The fewest rows of the joined tensor that each part along `dim` must have, without halos.

    Args:
        plan: how the network is split.
        sizes: of its input.
        dim: which dimension.
        measuring: batch norms that need two rows along it.
    """
    parts, lengths = plan.grid[dim], plan.lengths(sizes)
    joined, cuts = plan.joined(sizes)[dim], plan.cuts[dim]
    needed = []
    for part in range(parts):
        rows = 1
        for tensor, need in _needs(plan, dim, part, measuring):
            scale, offset = cuts.scales[plan.extents[tensor]], cuts.offsets[plan.extents[tensor]]
            if parts == 1:
                continue
            if part == 0:
                rows = max(rows, -((offset - need) // scale))
            elif part < parts - 1:
                rows = max(rows, -(-need // scale))
            else:
                rows = max(rows, joined - (lengths[tensor][dim] - need - offset) // scale)
        needed.append(rows)
    if sum(needed) > joined and parts > 1:
        raise InputError(
            f"an input of {_times(sizes)} is too small for grid={plan.grid}; give fewer patches or a larger input",
            details={f"dimension {dim} at the join": f"{joined} rows; the patches need {sum(needed)}"},
        )
    return needed


def all_min_rows(plan: SplitPlan, sizes: Sequence[int], measuring: Measuring) -> list[list[int]]:
    """`min_rows` along every dimension: of one image, batch norms have their two elements along the roomiest.

    Raises:
        InputError: no cuts leave every patch large enough.
    """
    found = [min_rows(plan, sizes, dim, Measuring()) for dim in range(len(plan.grid))]
    lengths = plan.lengths(sizes)
    whole = [dim for dim, parts in enumerate(plan.grid) if parts == 1]
    if all(any(lengths[number + 1][dim] > 1 for dim in whole) for number in measuring.steps):
        return found
    joined = plan.joined(sizes)
    cut = [dim for dim, parts in enumerate(plan.grid) if parts > 1]
    for dim in sorted(cut, key=lambda dim: joined[dim] / plan.grid[dim], reverse=True):
        try:
            found[dim] = min_rows(plan, sizes, dim, measuring)
        except InputError:
            continue
        return found
    raise _one_element(plan, sizes, measuring.steps[0])


def _needs(plan: SplitPlan, dim: int, part: int, measuring: Measuring) -> Iterator[tuple[int, int]]:
    """How many rows of which tensor the part needs at least."""
    for tensor in range(len(plan.steps) + 1):
        yield tensor, 1
    for number, step in enumerate(plan.steps):
        if step.mirrors and step.windows is not None:
            window = step.windows[dim]
            if part == 0:
                yield step.inputs[0], window.begin + 1
            if part == plan.grid[dim] - 1:
                yield step.inputs[0], window.end + 1
        if number in measuring.steps:
            yield number + 1, 2


def _one_element(plan: SplitPlan, sizes: Sequence[int], number: int) -> InputError:
    return InputError(
        f"{plan.steps[number].name} would normalise patches of one element a channel; give fewer patches, more images, "
        "or batch_norm='joint'",
        details={"grid": plan.grid, "image": _times(sizes)},
    )


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
