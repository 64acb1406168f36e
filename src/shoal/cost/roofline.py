"""Op times on a device that is not available, by the roofline model: FLOPs and bytes over its rates.

Times of this machine come from `shoal.cost.profile`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from shoal.core.hardware import Hardware
from shoal.core.step import Op, StepGraph


def roofline(graph: StepGraph, hardware: Hardware) -> StepGraph:
    """The step with the op times of another device, by the roofline model.

    Each op takes `max(flops / rate, bytes / bandwidth) + launch_seconds`, where

    - `rate` is `device.flops_per_second` (`half_flops_per_second` where the op writes float16 or bfloat16 and the
      device says it), times `k / 64` for a convolution that does only k < 64 multiply-adds per
      element of its largest tensor. Short inner products do not use all multipliers: first layers (k = 27 for 3x3 on
      three channels) and depthwise convolutions (k = 9) run far below the rate of large ones;
    - `bytes` are the op's `moved_bytes`, times the passes of its kernels over them: batch norm in training reads its
      input twice, for the statistics and to normalise (3/2 of the minimum); its backward reads both its operands
      twice (5/3), and so does group norm's; in pieces, these copy the result once more, as PReLU's do (7/3); max
      pooling's backward scatters (2).

    The host takes `host_launch_seconds` to launch each, while the device may run earlier ones.

    Workspaces are 0, but for what a norm's or a PReLU's gradient, or attention, in pieces holds: implicit-GEMM kernels
    need little, and the real ones are measured when the plan first runs on the device.

    Args:
        graph: a captured step, its ops with `flops` and `moved_bytes`.
        hardware: a preset or a measured machine.

    Returns:
        A new step, with the hardware's link; `graph` is unchanged. On a device without a rate for them, half-precision
        ops are timed at the float32 rate: an upper bound.
    """
    device = hardware.device

    def timed(op: Op) -> Op:
        halves = op.writes and graph.storages[op.writes[0]].dtype in _HALVES
        rate = (halves and device.half_flops_per_second) or device.flops_per_second
        compute_seconds = op.flops / (rate * _multiplier_use(op, graph))
        traffic_seconds = op.moved_bytes * _passes(op.target) / device.bytes_per_second
        seconds = max(compute_seconds, traffic_seconds) + device.launch_seconds
        launch_seconds = device.host_launch_seconds
        workspace_bytes = _piece_bytes(op, graph)
        return replace(op, seconds=seconds, workspace_bytes=workspace_bytes, launch_seconds=launch_seconds)

    def timed_twice(op: Op) -> Op:
        again = op.again
        if again is not None:
            second = timed(op.second)
            launch_seconds = second.launch_seconds
            again = replace(again, seconds=second.seconds, workspace_bytes=0, launch_seconds=launch_seconds)
        return replace(timed(op), again=again)

    return replace(graph, ops=tuple(timed_twice(op) for op in graph.ops), link=hardware.link)


_FULL_INNER_PRODUCT = 64
_PIECES = 8  # at most
_HALVES = ("float16", "bfloat16")


def _multiplier_use(op: Op, graph: StepGraph) -> float:
    if "convolution" not in op.target or op.flops == 0:
        return 1.0
    largest_elems = max((prod(graph.storages[storage].shape) for storage in (*op.reads, *op.writes)), default=1)
    return min(1.0, op.flops / (2 * max(largest_elems, 1)) / _FULL_INNER_PRODUCT)


def _piece_bytes(op: Op, graph: StepGraph) -> int:
    """What a gradient in pieces holds in addition to its operands: of PReLUs two of a piece."""
    if "attention_pieces" in op.target:
        return op.workspace_bytes  # known where it was made
    if not _is_gradient_in_pieces(op.target):
        return 0
    result = graph.storages[op.writes[0]]
    if "prelu.in_pieces" in op.target:
        of_one_slope = prod(graph.storages[op.writes[1]].shape) == 1
        return 2 * -(-result.nbytes // (_PIECES if of_one_slope else min(_PIECES, result.shape[1])))
    return -(-result.nbytes // min(_PIECES, result.shape[1]))


def _is_gradient_in_pieces(target: str) -> bool:
    return "norm_pieces" in target or "prelu.in_pieces" in target


def _passes(target: str) -> float:
    if _is_gradient_in_pieces(target):
        return 7 / 3
    if "batch_norm" in target or ("group_norm" in target and "backward" in target):
        return 5 / 3 if "backward" in target else 3 / 2
    if "max_pool" in target and "backward" in target:
        return 2.0
    return 1.0
