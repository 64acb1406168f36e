"""The rule for values that need not have plain PyTorch's bits: no further from float64 than plain float32 is.

Sums are rounded differently by each processor, so that the error of one tensor may double between two of them. The
tolerance is relative to what is summed: a gradient that is zero in exact arithmetic, such as that of a bias before a
batch norm, is a sum of numbers as large as those of its layer's other gradients, and is held against these.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_TIMES = 2.0  # two orders of summation may each be the luckier one
_TOLERANCE = 1e-5  # of what is summed: a hundred roundings of float32


def too_far(
    ours: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    tolerance: float = _TOLERANCE,
) -> dict[str, tuple[float, float]]:
    """The tensors that break the rule, each with its largest error and the one allowed.

    Args:
        ours: tensors by name; those of one layer have the same prefix up to the last dot.
        plain: the same of plain PyTorch, in the same dtype.
        exact: the same of plain PyTorch in float64.
        tolerance: allowed in addition to plain PyTorch's error, relative to the largest value of the layer.
    """
    if not ours.keys() == plain.keys() == exact.keys():
        raise AssertionError(f"not the same tensors: {sorted(ours)}, {sorted(plain)}, {sorted(exact)}")
    summed: dict[str, float] = {}
    for name, right in exact.items():
        layer = name.rpartition(".")[0] or name
        summed[layer] = max(summed.get(layer, 0.0), _largest(right))
    found: dict[str, tuple[float, float]] = {}
    for name, right in exact.items():
        error = _largest(ours[name].double() - right)
        allowed = _TIMES * _largest(plain[name].double() - right)
        allowed += tolerance * summed[name.rpartition(".")[0] or name]
        if not error <= allowed:  # NaN is too far
            found[name] = error, allowed
    return found


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
