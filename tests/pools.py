"""Random max poolings for tests, in two and three dimensions, with what PyTorch makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

aten = torch.ops.aten
FORWARD = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}
BACKWARD = {2: aten.max_pool2d_with_indices_backward, 3: aten.max_pool3d_with_indices_backward}
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
_HARD_VALUES = [float("nan"), float("-inf"), float("inf"), -0.0, 0.0]


@dataclass
class Pool:
    x: torch.Tensor
    window: tuple[list[int], list[int], list[int], list[int]]  # kernel, stride, padding, dilation
    ceil_mode: bool
    pooled: torch.Tensor
    indices: torch.Tensor

    @property
    def options(self) -> list[Any]:
        return [*self.window, self.ceil_mode]

    @property
    def dims(self) -> int:
        return self.x.dim() - 2


@st.composite
def pools(draw: st.DrawFn, most_dilation: int = 2) -> Pool:
    """A pooling of few different values, so that windows have several winners, NaN and infinities among them."""
    dims = draw(st.sampled_from([2, 2, 3]))
    per_axis = lambda least, most: draw(st.lists(st.integers(least, most), min_size=dims, max_size=dims))  # noqa: E731
    kernel, stride, dilation = per_axis(1, 4), per_axis(1, 3), per_axis(1, most_dilation)
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 3)), *per_axis(1, 8))
    x = torch.randint(-2, 3, shape, generator=generator)
    x = x.to(draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))
    for value in draw(st.lists(st.sampled_from(_HARD_VALUES), max_size=2)):
        x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.1, 0.9]))] = value
    if draw(st.booleans()):
        x = x.contiguous(memory_format=CHANNELS_LAST[dims])
    window, ceil_mode = (kernel, stride, padding, dilation), draw(st.booleans())
    try:
        pooled, indices = FORWARD[dims](x, *window, ceil_mode)
    except RuntimeError:  # the window is larger than the image
        assume(False)
    assume(_inside_windows(indices, shape[2:], window))
    return Pool(x, window, ceil_mode, pooled, indices)


def _inside_windows(
    indices: torch.Tensor, extents: tuple[int, ...], window: tuple[list[int], list[int], list[int], list[int]]
) -> bool:
    # PyTorch's indices lead elsewhere, even out of the image, for windows that dilation moves off the image, and for
    # windows of nothing but -inf in three dimensions and channels_last.
    places = torch.unravel_index(indices, extents)
    for axis, (place, extent, kernel, stride, padding, dilation) in enumerate(
        zip(places, extents, *window, strict=True)
    ):
        starts = torch.arange(indices.shape[axis + 2]) * stride - padding
        steps = place - starts.view([-1 if other == axis + 2 else 1 for other in range(indices.dim())])
        if ((steps < 0) | (steps % dilation > 0) | (steps >= kernel * dilation) | (place >= extent)).any():
            return False
    return bool((indices >= 0).all()) and int(indices.max()) < torch.Size(extents).numel()
