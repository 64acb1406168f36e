"""The step at a batch size, interpolated from the steps at two others.

Every count of a step (bytes, shapes, floating-point operations) is a constant plus so much for each image, so two
captured steps of the same variant give all others. Steps that differ in more than counts (a network that computes
something else at some size) are not interpolated, nor are counts that would not be whole (an allocator that rounds).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from shoal.core.step import Again, Op, StepGraph, Storage

_NUMBER = re.compile(r"(\d+)")
_Run = TypeVar("_Run", Op, Again)
_Count = Callable[[int, int], int]


class NotLinear(Exception):
    """A step has to be captured: it is not what those at other batches let expect."""


def scaled_step(one: StepGraph, one_batch: int, other: StepGraph, other_batch: int, batch: int) -> StepGraph | None:
    """The step at `batch` images, as capturing it would give it.

    Args:
        one, other: the step as captured, without times, at `one_batch` and `other_batch` images.
        batch: best between the two.

    Returns:
        The step, or None if the two are not of one variant or a count would not be whole.
    """
    if _form(one) != _form(other):
        return None
    share = Fraction(batch - one_batch, other_batch - one_batch)

    def count(at_one: int, at_other: int) -> int:
        value = at_one + share * (at_other - at_one)
        if value.denominator != 1:
            raise ValueError(f"{value} is not whole")
        return int(value)

    try:
        ops = tuple(_op(op, same, count) for op, same in zip(one.ops, other.ops, strict=True))
        storages = tuple(_storage(s, same, count) for s, same in zip(one.storages, other.storages, strict=True))
        shared_result_bytes = count(one.shared_result_bytes, other.shared_result_bytes)
    except ValueError:
        return None
    saved_bytes = round(one.rewrites_save_bytes + share * (other.rewrites_save_bytes - one.rewrites_save_bytes))
    return replace(
        one,
        ops=ops,
        storages=storages,
        as_written=None,
        rewrites_save_bytes=saved_bytes,
        shared_result_bytes=shared_result_bytes,
    )


def _form(graph: StepGraph) -> StepGraph:
    """The step without its counts."""
    return replace(
        graph,
        ops=tuple(replace(_bare(op), workspace_bytes=0, again=op.again and _bare(op.again)) for op in graph.ops),
        storages=tuple(replace(s, nbytes=0, shape=(0,) * len(s.shape)) for s in graph.storages),
        shared_result_bytes=0,
    )


def _bare(run: _Run) -> _Run:
    return replace(run, signature=_NUMBER.sub("0", run.signature), flops=0, moved_bytes=0)


def _op(one: Op, other: Op, count: _Count) -> Op:
    return replace(
        _run(one, other, count),
        workspace_bytes=count(one.workspace_bytes, other.workspace_bytes),
        again=_run(one.again, other.again, count) if one.again and other.again else None,
    )


def _run(one: _Run, other: _Run, count: _Count) -> _Run:
    return replace(
        one,
        signature=_signature(one.signature, other.signature, count),
        flops=count(one.flops, other.flops),
        moved_bytes=count(one.moved_bytes, other.moved_bytes),
    )


def _signature(one: str, other: str, count: _Count) -> str:
    """Shapes and strides stand in it as text."""
    parts = zip(_NUMBER.split(one), _NUMBER.split(other), strict=True)
    return "".join(a if a == b else str(count(int(a), int(b))) for a, b in parts)


def _storage(one: Storage, other: Storage, count: _Count) -> Storage:
    return replace(one, nbytes=count(one.nbytes, other.nbytes), shape=tuple(map(count, one.shape, other.shape)))
