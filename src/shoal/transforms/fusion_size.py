"""Where a fused layer is worth its call: decided at every call, by the size of what is normalised.

No magic: all it does is compare a number of elements with one that was measured.
"""

from __future__ import annotations

from typing import Literal

import torch

from shoal.runtime.direct_call import watched

When = Literal["pays", "always"]
WHENS: tuple[When, ...] = ("pays", "always")

LEAST_ELEMS = 1 << 18
"""Elements from which on a fused batch norm is faster than PyTorch's own, called from Python on the CPU.

Below, the passes over the tensor that fusing saves (one reads or writes a cached element in about 0.1 ns) are worth
less than what the call of an op written in Python costs beside PyTorch's own (`bench.batchnorm --crossing`)."""


def fuses(when: When, x: torch.Tensor, elems: int | None = None) -> bool:
    """Whether a batch norm of `elems` elements, by default those of `x`, is done by its neighbours.

    Always on devices other than the CPU, for which nothing was measured, and where a compiler, a capture or a dispatch
    mode watches: it gets the op, whose call costs nothing there.

    >>> fuses("pays", torch.ones(1, 8, 4, 4)), fuses("always", torch.ones(1, 8, 4, 4))
    (False, True)
    """
    if when == "always" or torch.compiler.is_compiling():
        return True
    return (x.numel() if elems is None else elems) >= LEAST_ELEMS or not x.is_cpu or watched((x,))
