"""The ops of a split region, on one patch: every window is masked to the patch it lies in.

A *region* says, for each dimension, from where to where each of its patches reaches. A patch has one index a
dimension. Where a patch is padded on both sides as the layer pads, or would lose no output by it, the layer's own
kernel does it; else the patch is padded first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from shoal.transforms.split.sliding_window import SlidingWindow
from shoal.transforms.split.spatial_ops import padding_mode, windows_of

Span = tuple[int, int]
Region = tuple[tuple[Span, ...], ...]

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _max_pool1d(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool = False,
) -> torch.Tensor:
    """`F.max_pool1d` as it does it, but without fixing sizes that a compiler has for symbols."""
    flat = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    return F.max_pool2d(x.unsqueeze(-2), *flat, ceil_mode).squeeze(-2)


_MAX_POOLS: dict[int, Callable[..., torch.Tensor]] = {1: _max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def at(region: Region, patch: Sequence[int]) -> tuple[Span, ...]:
    """From..to along each dimension of one patch."""
    return tuple(spans[place] for spans, place in zip(region, patch, strict=True))


def cut(x: torch.Tensor, want: Region, patch: Sequence[int]) -> torch.Tensor:
    """One patch of a whole tensor."""
    first = x.dim() - len(want)
    for dim, (begin, end) in enumerate(at(want, patch), first):
        if (begin, end) != (0, x.shape[dim]):
            x = x.narrow(dim, begin, end - begin)
    return x


def crop(x: torch.Tensor, have: Region, want: Region, patch: Sequence[int]) -> torch.Tensor:
    """The part `want` of the patch `have` of a tensor; the tensor itself where they are one."""
    first = x.dim() - len(have)
    for dim, (has, wants) in enumerate(zip(at(have, patch), at(want, patch), strict=True)):
        if has != wants:
            x = x.narrow(first + dim, wants[0] - has[0], wants[1] - wants[0])
    return x


def join(patches: Sequence[torch.Tensor], grid: Sequence[int]) -> torch.Tensor:
    """The patches of a grid, last index fastest, as one tensor."""
    rows = list(patches)
    for dim, parts in zip(range(-1, -len(grid) - 1, -1), reversed(grid), strict=True):
        if parts > 1:
            rows = [torch.cat(rows[n : n + parts], dim) for n in range(0, len(rows), parts)]
    return rows[0]


def convolve(x: torch.Tensor, layer: _ConvNd, inputs: Region, outputs: Region, patch: Sequence[int]) -> torch.Tensor:
    """A convolution of one patch."""
    windows = windows_of(layer, len(inputs))
    begins = _native_padding(windows, inputs, outputs, patch)
    if layer.padding_mode == "zeros" and begins is not None:
        if begins == layer.padding:
            return layer(x)
    else:
        x = _padded(x, windows, inputs, outputs, patch, layer.padding_mode)
        begins = (0,) * len(windows)
    run = _CONVOLUTIONS[len(windows)]
    return run(x, layer.weight, layer.bias, layer.stride, begins, layer.dilation, layer.groups)


def pad(x: torch.Tensor, layer: nn.Module, inputs: Region, outputs: Region, patch: Sequence[int]) -> torch.Tensor:
    """A padding layer on one patch: it pads only at the borders of the whole."""
    mode = padding_mode(layer)
    assert mode is not None
    value = float(getattr(layer, "value", 0.0))
    return _padded(x, windows_of(layer, len(inputs)), inputs, outputs, patch, mode, value)


def pool(x: torch.Tensor, layer: nn.Module, inputs: Region, outputs: Region, patch: Sequence[int]) -> torch.Tensor:
    """A maximum or average pooling of one patch."""
    windows = windows_of(layer, len(inputs))
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    if isinstance(layer, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)):
        return _average(x, layer, windows, inputs, outputs, patch)
    dilation = [w.dilation for w in windows]
    begins = _native_padding(windows, inputs, outputs, patch)
    run = _MAX_POOLS[len(windows)]
    if begins is not None and all(2 * b <= k for b, k in zip(begins, kernel, strict=True)):
        return run(x, kernel, stride, begins, dilation)
    if _is_native(windows, inputs, outputs, patch):
        return run(x, kernel, stride, [w.begin for w in windows], dilation, windows[0].ceil)
    x = _padded(x, windows, inputs, outputs, patch, "constant", _min_value(x))
    return run(x, kernel, stride, [0] * len(windows), dilation)


def _average(
    x: torch.Tensor,
    layer: nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d,
    windows: Sequence[SlidingWindow],
    inputs: Region,
    outputs: Region,
    patch: Sequence[int],
) -> torch.Tensor:
    if _is_native(windows, inputs, outputs, patch) and not any(w.begin or w.end or w.ceil for w in windows):
        return layer(x)
    spans = zip(windows, at(inputs, patch), at(outputs, patch), inputs, strict=True)
    counts = [_counts(w, i, o, every[-1][1], layer.count_include_pad, x.device) for w, i, o, every in spans]
    kernel, stride = [w.kernel for w in windows], [w.stride for w in windows]
    padded = _padded(x, windows, inputs, outputs, patch, "constant")
    means = _AVG_POOLS[len(windows)](padded, kernel, stride)
    taps = 1
    for window in windows:
        taps *= window.kernel
    divisor = getattr(layer, "divisor_override", None)
    if divisor:
        return means * (taps / divisor)
    for dim, count in enumerate(counts):
        shape = [1] * len(counts)
        shape[dim] = -1
        means = means * (windows[dim].kernel / count.to(x.dtype)).reshape(shape)
    return means


def _counts(
    window: SlidingWindow, inputs: Span, outputs: Span, length: int, include_padding: bool, device: torch.device
) -> torch.Tensor:
    """What each window of a patch divides by, along one dimension."""
    first = torch.arange(*outputs, device=device) * window.stride - window.begin
    last = first + window.kernel
    if include_padding:
        return last.clamp(max=length + window.end) - first
    return (last.clamp(max=inputs[1]) - first.clamp(min=inputs[0])).clamp(min=1)


def _is_native(windows: Sequence[SlidingWindow], inputs: Region, outputs: Region, patch: Sequence[int]) -> bool:
    """Whether the layer as it is does right by the patch: same padding in front, same number of windows."""
    for window, has, makes in zip(windows, at(inputs, patch), at(outputs, patch), strict=True):
        begin, _ = window.padding(has, makes)
        if begin != window.begin or window.out_length(has[1] - has[0]) != makes[1] - makes[0]:
            return False
    return True


def _native_padding(
    windows: Sequence[SlidingWindow], inputs: Region, outputs: Region, patch: Sequence[int]
) -> tuple[int, ...] | None:
    """The padding, the same on both sides, with which a kernel makes the outputs; None where there is none."""
    begins = []
    for window, has, makes in zip(windows, at(inputs, patch), at(outputs, patch), strict=True):
        begin, _ = window.padding(has, makes)
        evenly = SlidingWindow(window.kernel, window.stride, window.dilation, begin, begin)
        if begin < 0 or evenly.out_length(has[1] - has[0]) != makes[1] - makes[0]:
            return None
        begins.append(begin)
    return tuple(begins)


def _padded(
    x: torch.Tensor,
    windows: Sequence[SlidingWindow],
    inputs: Region,
    outputs: Region,
    patch: Sequence[int],
    mode: str,
    value: float = 0.0,
) -> torch.Tensor:
    """The patch padded and cropped to what its windows cover: at borders as the layer does, inside with `value`."""
    whole = border_padding(windows, inputs, outputs, patch)
    inner = []
    for window, outer, has, makes in zip(windows, whole, at(inputs, patch), at(outputs, patch), strict=True):
        begin, end = window.padding(has, makes)
        inner.append((begin - outer[0], end - outer[1]))
    if mode not in ("zeros", "constant") and any(any(outer) for outer in whole):
        x = F.pad(x, _last_first(whole), mode)
        return F.pad(x, _last_first(inner)) if any(any(one) for one in inner) else x
    both = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(whole, inner, strict=True)]
    return F.pad(x, _last_first(both), value=value) if any(any(one) for one in both) else x


def border_padding(
    windows: Sequence[SlidingWindow], inputs: Region, outputs: Region, patch: Sequence[int]
) -> list[tuple[int, int]]:
    """By how much a patch is padded at the borders of the whole, as the layer pads those."""
    found = []
    for dim, (window, has, makes) in enumerate(zip(windows, at(inputs, patch), at(outputs, patch), strict=True)):
        begin, end = window.padding(has, makes)
        is_first, is_last = has[0] == 0, has[1] == inputs[dim][-1][1]
        found.append(
            (
                min(begin, window.begin) if is_first and begin > 0 else 0,
                min(end, window.end) if is_last and end > 0 else 0,
            )
        )
    return found


def _last_first(pads: Sequence[Span]) -> list[int]:
    return [number for begin, end in reversed(pads) for number in (begin, end)]


def _min_value(x: torch.Tensor) -> float:
    return float("-inf") if x.is_floating_point() else float(torch.iinfo(x.dtype).min)
