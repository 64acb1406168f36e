"""`shoal::norm_act`: gradients, layouts, dtypes, and what it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.runtime.norm_act import norm_act


def _leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_gradcheck(rectify: bool, adds: bool) -> None:
    xs = [_leaf(2, 2, 3, 3, seed=1), _leaf(2, 1, 3, 3, seed=2)]
    vectors = [_leaf(3, seed=seed) for seed in (3, 4, 5)]
    residual = [_leaf(2, 3, 3, 3, seed=6)] if adds else []

    def call(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return norm_act([a, b], *rest[:3], rest[3] if adds else None, rectify)

    assert torch.autograd.gradcheck(call, [*xs, *vectors, *residual])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("adds", [False, True])
def test_what_the_compiler_believes_is_so(dtype: torch.dtype, layout: torch.memory_format, adds: bool) -> None:
    def tensor(channels: int) -> torch.Tensor:
        x = _leaf(2, channels, 3, 3, seed=channels, dtype=dtype).detach()
        return x.contiguous(memory_format=layout).requires_grad_()

    vectors = [_leaf(3, seed=seed, dtype=torch.float32) for seed in (3, 4, 5)]
    arguments: Any = ([tensor(2), tensor(1)], *vectors, tensor(3) if adds else None, True)
    torch.library.opcheck(torch.ops.shoal.norm_act.default, arguments)
    z = torch.ops.shoal.norm_act(*arguments)
    assert z.is_contiguous(memory_format=layout) and z.dtype == dtype


def test_its_result_is_saved_only_after_a_residual() -> None:
    x, residual = _leaf(2, 3, 8, 8, seed=1), _leaf(2, 3, 8, 8, seed=2)
    vectors = [_leaf(3, seed=seed) for seed in (3, 4, 5)]
    for other, tensors in ((None, 1), (residual, 2)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):  # noqa: B023
            norm_act([x], *vectors, other, True)
        assert sum(nbytes == x.nbytes for nbytes in saved) == tensors
