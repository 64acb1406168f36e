"""Triton's kernel against the norm and then its activation: on CUDA where there is one, else interpreted.

`tests.test_interpreter` runs these in the interpreter.
"""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.norm.norm_operands import RELU, Activation
from shoal.kernels.norm.norm_sweeps_triton import TRITON
from shoal.kernels.norm_again import activated, normalise
from shoal.lowlevel.dispatch import TABLE
from tests.interpreter import not_interpreted, on_device, with_triton
from tests.kernels_elsewhere import compiled_for, each_capability, there

SHAPES = [(2, 6, 5, 7, 3), (1, 4, 60, 41), (3, 2, 1), (2, 4, 3000)]


@on_device
@with_triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slope", [0.0, 0.01])
@pytest.mark.parametrize("groups", [0, 2])
def test_it_is_the_norm_and_then_the_activation(device: str, shape: tuple[int, ...], slope: float, groups: int) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=draw).to(device) * 3 + 1
    x.view(-1)[0] = torch.nan
    weight, bias = (torch.randn(shape[1], generator=draw).to(device) for _ in range(2))
    of_statistics = (shape[0], groups) if groups else (shape[1],)
    mean, invstd = (torch.rand(of_statistics, generator=draw).to(device) + 0.5 for _ in range(2))
    assert TRITON.applies(x)
    for vectors in [(weight, bias)] if groups else [(weight, bias), (None, None)]:
        z = normalise(x, *vectors, mean, invstd)
        expected = torch.nn.functional.leaky_relu(z, slope) if slope else z.relu()
        found = activated(x, *vectors, mean, invstd, slope, list(shape))
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
        assert not (found.signbit() & (found == 0)).any() or slope  # a ReLU's zeros are positive


@with_triton
@not_interpreted
@each_capability
def test_it_compiles_for_a_device_that_is_not_here(capability: int) -> None:
    by_triton = TABLE["activated_norm"].functions("triton")
    with compiled_for(capability) as found:
        for dtype in (torch.float32, torch.bfloat16):
            x, vector = there(1, 64, 32, 32, 32, dtype=dtype), there(64)
            by_triton(x, vector, vector, vector, vector, Activation("leaky_relu", 0.01))
            by_triton(x, None, None, vector, vector, RELU)
    assert found.keys() == {"activate"}
    assert any("ld.global.v4" in ptx for ptx in found["activate"])  # 16 bytes at a time
