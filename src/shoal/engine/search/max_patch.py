"""The largest patch that fits a budget, in few tries, and which patches a network takes.

Pure functions over sizes: how a patch is planned, and whether the network takes it, is handed in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod

from shoal.errors import BudgetError, CaptureError, InputError, ShoalError

Patch = tuple[int, ...]
_CUBES = (32, 64, 96, 128, 160, 192, 256)  # sides that many networks take
_CLOSE = 1.01  # one that is no larger than this in voxels is not looked for


def shown(patch: Sequence[int]) -> str:
    """A patch in words.

    >>> shown((32, 128, 128))
    '32x128x128'
    """
    return "x".join(map(str, patch))


def multiples(why_not: Callable[[Patch], str], patch: Patch) -> Patch:
    """What each side of a patch has to be a multiple of, found by trying.

    Args:
        why_not: why the network does not take a patch; "" where it does.
        patch: one of as many axes, tried first.

    Returns:
        One number for each axis.

    Raises:
        InputError: the network took none that was tried.

    Example:
        >>> multiples(lambda patch: "" if patch[0] % 8 == 0 and patch[1] % 32 == 0 else "uneven", (48, 100))
        (8, 32)
    """
    refused = ""
    for base in (patch, *((side,) * len(patch) for side in _CUBES)):
        reason = why_not(base)
        if not reason:
            return tuple(_multiple(why_not, base, axis) for axis in range(len(base)))
        refused = refused or reason
    raise InputError(
        f"the network takes no patch that was tried, such as {shown(patch)}; give multiple_of= what its strides divide",
        details={"error": refused},
    )


def _multiple(why_not: Callable[[Patch], str], base: Patch, axis: int) -> int:
    side = base[axis]
    steps = (step for step in range(1, side) if side % step == 0)
    return next((step for step in steps if not why_not(_with_side(base, axis, side + step))), side)


def check_divides(patch: Patch, multiple: Patch, *, asked: bool = False) -> None:
    """InputError, which names what would do, where a patch is none that the network takes.

    Args:
        asked: whether the multiples are what the caller gave as multiple_of=, not what the network takes.
    """
    if any(side % step for side, step in zip(patch, multiple, strict=True)):
        who = "multiple_of= asks for" if asked else "the network takes"
        raise InputError(f"patch={patch}: {who} {nearest(patch, multiple)}")


def nearest(patch: Patch, multiple: Patch) -> str:
    """The multiples that are nearest to a patch, in words.

    >>> nearest((100, 128), (32, 32))
    'sides that are multiples of 32x32; 96x128 or 128x128 would do'
    """
    lower = tuple(max(side // step, 1) * step for side, step in zip(patch, multiple, strict=True))
    upper = tuple(-(-side // step) * step for side, step in zip(patch, multiple, strict=True))
    would_do = shown(lower) if lower == upper else f"{shown(lower)} or {shown(upper)}"
    return f"sides that are multiples of {shown(multiple)}; {would_do} would do"


def ladder(patch: Patch, multiple: Patch, most: Patch | None, max_voxels: int) -> list[Patch]:
    """Patches from the smallest to the largest, each with one side longer than the one before it.

    The side that grows is the one that is shortest relative to `most`, or to `patch` if there is no `most`; the
    first of those where several are.

    Args:
        patch: among them.
        multiple: what sides grow by.
        most: no side is longer; None for no limit.
        max_voxels: no patch has more.

    Example:
        >>> ladder((16, 32, 32), (8, 16, 16), (24, 64, 64), 10**6)[1:]
        [(8, 32, 16), (8, 32, 32), (16, 32, 32), (16, 48, 32), (16, 48, 48), (24, 48, 48), (24, 64, 48), (24, 64, 64)]
    """
    beside = most or patch
    found = [patch]
    while (axis := _to_shrink(found[-1], multiple, beside)) is not None:
        found.append(_with_side(found[-1], axis, found[-1][axis] - multiple[axis]))
    found.reverse()
    while (axis := _to_grow(found[-1], multiple, beside, most)) is not None:
        found.append(_with_side(found[-1], axis, found[-1][axis] + multiple[axis]))
        if prod(found[-1]) > max_voxels:
            return found[:-1]
    return found


@dataclass(frozen=True)
class Largest:
    """What `largest_patch` found: the patch, and the smallest that was tried and does not fit (None for none)."""

    patch: Patch
    too_large: Patch | None


def largest_patch(
    plan_of: Callable[[Patch], object],
    steps: Sequence[Patch],
    first: Patch,
    multiple: Patch,
    most: Patch | None,
    *,
    fixed_bytes: int,
    budget_bytes: int,
    trying: Callable[[Patch], object] = lambda patch: None,
) -> Largest:
    """The largest patch that fits `budget_bytes`: no side of it can grow by its multiple.

    From `first` on it goes to twice the voxels until they no longer fit, then narrows down by what the planner says the
    least budget would be; at last it tries to grow each side by itself. It assumes that where a patch does not fit,
    none with more voxels does.

    Args:
        plan_of: plans a patch; raises BudgetError where no plan fits.
        steps: of `ladder`.
        first: one of them, to begin with.
        multiple, most: as of `ladder`.
        fixed_bytes: about what a step needs whatever its patch.
        trying: called with each patch before it is planned.

    Raises:
        BudgetError: not even the smallest fits; it names that one.
        CaptureError, InputError: `plan_of` cannot plan the first patch, for another reason.

    Example:
        >>> def plan_of(patch):
        ...     needed = 1000 + 10 * patch[0] * patch[1]
        ...     if needed > 90_000:
        ...         raise BudgetError("too small", least_feasible_bytes=needed)
        >>> steps = ladder((32, 32), (16, 16), None, 10**6)
        >>> largest_patch(plan_of, steps, (32, 32), (16, 16), None, fixed_bytes=1000, budget_bytes=90_000)
        Largest(patch=(96, 80), too_large=(112, 80))
    """
    voxels = [prod(patch) for patch in steps]
    fits, too_large = -1, len(steps)
    at = steps.index(first)
    needed: tuple[int, int] | None = None  # voxels and least bytes of the last that did not fit
    unfit: BudgetError | None = None
    for n in count():
        trying(steps[at])
        try:
            plan_of(steps[at])
        except BudgetError as error:
            too_large, unfit = at, error
            needed = (voxels[at], error.least_feasible_bytes) if error.least_feasible_bytes else None
        except (CaptureError, InputError) as error:
            if fits < 0:  # for no patch at all; or, below one that does not fit, for none so small
                refusal: ShoalError = error if unfit is None else _smallest(unfit, steps[too_large])
                raise refusal from None
            too_large = at
        else:
            fits = at
        if too_large - fits <= 1 or (0 <= fits < too_large < len(steps) and voxels[too_large] <= _CLOSE * voxels[fits]):
            break
        if too_large == len(steps):
            at = min(bisect_left(voxels, 2 * voxels[fits]), len(steps) - 1)
            continue
        at = (fits + too_large) // 2
        if needed is not None and n % 3 != 2 and needed[1] > fixed_bytes:
            aim = needed[0] * (budget_bytes - fixed_bytes) / (needed[1] - fixed_bytes)
            at = bisect_right(voxels, aim) - 1
        at = min(max(at, fits + 1), too_large - 1)
    if fits < 0:
        assert unfit is not None
        raise _smallest(unfit, steps[0])
    found = Largest(steps[fits], steps[too_large] if too_large < len(steps) else None)
    return found if found.too_large is None else _each_side(plan_of, found, multiple, most, trying)


def _each_side(
    plan_of: Callable[[Patch], object],
    found: Largest,
    multiple: Patch,
    most: Patch | None,
    trying: Callable[[Patch], object],
) -> Largest:
    """Grow sides one by one, while any can."""
    patch, too_large = found.patch, found.too_large
    assert too_large is not None
    beside, stuck = most or patch, set[int]()
    while (axis := _to_grow(patch, multiple, beside, most, stuck)) is not None:
        larger = _with_side(patch, axis, patch[axis] + multiple[axis])
        if prod(larger) < prod(too_large) and prod(larger) > _CLOSE * prod(patch):
            trying(larger)
            try:
                plan_of(larger)
            except BudgetError:
                too_large = larger
            except (CaptureError, InputError):
                pass
            else:
                patch = larger
                continue
        stuck.add(axis)
    return Largest(patch, too_large)


def _smallest(error: BudgetError, patch: Patch) -> BudgetError:
    return error.with_detail("smallest patch that the network takes", shown(patch))


def _with_side(patch: Patch, axis: int, side: int) -> Patch:
    return (*patch[:axis], side, *patch[axis + 1 :])


def _to_grow(
    patch: Patch, multiple: Patch, beside: Patch, most: Patch | None, stuck: Sequence[int] | set[int] = ()
) -> int | None:
    free = [
        axis
        for axis, side in enumerate(patch)
        if axis not in stuck and (most is None or side + multiple[axis] <= most[axis])
    ]
    return min(free, key=lambda axis: (patch[axis] / beside[axis], axis), default=None)


def _to_shrink(patch: Patch, multiple: Patch, beside: Patch) -> int | None:
    free = [axis for axis, side in enumerate(patch) if side > multiple[axis]]
    return max(free, key=lambda axis: (patch[axis] / beside[axis], axis), default=None)
