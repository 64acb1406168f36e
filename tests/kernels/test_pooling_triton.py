"""Triton's kernels of max pooling against PyTorch's: on CUDA where there is one, else interpreted.

`tests.test_interpreter` runs these in the interpreter.
"""

from __future__ import annotations

import pytest
import torch

from shoal.kernels import pooling
from shoal.kernels.memory_format import suggested_memory_format
from shoal.kernels.pooling import TRITON
from tests.interpreter import INTERPRETED, not_interpreted, on_device, with_triton
from tests.kernels_elsewhere import compiled_for, each_capability, kernels_of, there
from tests.pools import BACKWARD, CHANNELS_LAST, FORWARD

CASES = {
    "overlapping": ((2, 5, 9, 37), ([3, 3], [2, 2], [1, 1], [1, 1], False)),
    "dense": ((2, 7, 10, 6), ([3, 3], [1, 1], [1, 1], [1, 1], True)),
    "apart": ((3, 3, 40, 30), ([2, 2], [2, 2], [0, 0], [1, 1], False)),
    "with gaps": ((1, 20, 19, 16), ([2, 3], [3, 4], [1, 1], [1, 1], True)),
    "numbered places": ((1, 2, 9, 300), ([3, 5], [2, 2], [1, 2], [1, 1], False)),
    "one pixel": ((2, 3, 1, 1), ([3, 3], [2, 2], [1, 1], [1, 1], False)),
    "volume": ((1, 5, 6, 7, 8), ([3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], False)),
}
if INTERPRETED:  # each channel of an image is programs of its own, which take tens of milliseconds
    CASES = {
        name: ((shape[0] if name == "overlapping" else 1, min(shape[1], 2), *shape[2:]), options)
        for name, (shape, options) in CASES.items()
    }


@on_device
@with_triton
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), ("overlapping", torch.bfloat16), ("overlapping", torch.float16)],
)
def test_results_codes_and_gradients_are_those_of_pytorch(
    case: str, channels_last: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, options = CASES[case]
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(-3, 4, shape, generator=draw).float()  # ties
    for value in (float("nan"), float("-inf"), float("inf")):
        x[torch.rand(shape, generator=draw) < 0.03] = value
    x = x.to(device, dtype)
    if channels_last:
        x = x.contiguous(memory_format=CHANNELS_LAST[len(shape) - 2])
    # Interpreted, both meet in one case: what a ReLU changes depends on no shape and no layout.
    for after_relu in (False, True) if not INTERPRETED or case == "overlapping" else (channels_last,):
        x = x.relu() if after_relu else x
        pooled, indices = FORWARD[len(shape) - 2](x, *options)
        assert TRITON.applies(torch.contiguous_format, [1, 1], pooled.contiguous())
        monkeypatch.setenv("SHOAL_KERNELS", "reference")
        _, expected_codes = pooling.forward(x, *options, after_relu)
        monkeypatch.setenv("SHOAL_KERNELS", "triton")
        found, codes = pooling.forward(x, *options, after_relu)
        torch.testing.assert_close(found, pooled, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(codes, expected_codes)
        assert found.stride() == pooled.stride() == codes.stride()

        grad = torch.empty_like(pooled).copy_(torch.randn(pooled.shape, generator=draw))
        in_pixels = suggested_memory_format(x) is not torch.contiguous_format
        gradient = pooling.backward(grad, codes, list(shape), in_pixels, *options, after_relu)
        # PyTorch's kernels on CUDA add up in float32 too; those of volumes in any order. The interpreter cuts bits off.
        exact = device == "cpu" or len(shape) == 4
        kind = torch.float32 if device == "cpu" else dtype
        expected = BACKWARD[len(shape) - 2](grad.to(kind), x.to(kind), *options, indices)
        expected = torch.ops.aten.threshold_backward(expected, x.to(kind), 0) if after_relu else expected
        rtol = 2**-7 if not exact or (device == "cpu" and dtype == torch.bfloat16) else 0
        torch.testing.assert_close(gradient, expected.to(dtype), rtol=rtol, atol=0)
        assert gradient.stride() == expected.stride()


@with_triton
@not_interpreted
@each_capability
def test_they_compile_for_a_device_that_is_not_here(capability: int) -> None:
    from shoal.kernels import pooling_triton_kernels

    layouts = {False: torch.contiguous_format, True: torch.channels_last}
    options = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    with compiled_for(capability) as found:
        for dtype in (torch.float32, torch.bfloat16):
            for channels_last, layout in layouts.items():
                x = there(64, 64, 112, 112, dtype=dtype, channels_last=channels_last)
                pooled, codes = TRITON.forward(x, [56, 56], layout, options, True)
                TRITON.backward(pooled, codes, x, options, True)
    assert found.keys() == kernels_of(pooling_triton_kernels)
