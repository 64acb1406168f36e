"""How much scratch this processor's convolutions take: where oneDNN has only SSE4.1, they unfold the images."""

from __future__ import annotations

import pytest
import torch

from bench.fuzz_step import allocated

_MOST = 4.0  # times what the op reads: 2.9 with AVX2 and AVX-512, 5.5 with SSE4.1


def _takes_little_scratch() -> bool:
    x, weight = torch.randn(2, 16, 32, 32), torch.randn(16, 16, 3, 3)

    def backward() -> None:
        torch.ops.aten.convolution_backward(
            x, x, weight, [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )

    backward()  # kernels are selected
    return bool(allocated(backward)[1] <= _MOST * (x.nbytes + weight.nbytes))


needs_little_scratch = pytest.mark.skipif(
    not _takes_little_scratch(), reason="this processor's convolutions take more scratch than what the test plans"
)
"""For tests of what fits, or wins, in steps whose largest tensors are activations."""
