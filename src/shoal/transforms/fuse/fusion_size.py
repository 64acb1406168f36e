"""Where a fused layer is worth its call: decided at every call, by the size of what is normalised or the work there is.

No magic: all it does is compare a number with one that measurements suggest, which are of the CPU. On a GPU a fused
layer is more launches than PyTorch's own layers. Whether these pay depends on rates that are not known here, so there
the answer is no in eager mode; `shoal.compile` compares the step with and without fused batch norms, by launches and
kernels that it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from shoal.kernels.norm.norm_conv import runs_winograd
from shoal.kernels.norm.norm_conv_native import ConvWindow
from shoal.lowlevel.direct_call import needs_dispatch

When = Literal["pays", "always", "large"]
WHENS: tuple[When, ...] = ("pays", "always")  # of `fuse_batchnorm`

MIN_ELEMS = 1 << 20
"""Elements from which on a fused batch norm is worth its call from Python, on the CPU: 2^18 to 2^21 were tried on six
networks, whose scatter separated only the ends; one layer in the cache lost up to 2^19.

A smaller map (4 MiB of float32) stays in the last cache, where the passes over it that fusing saves are worth less than
what calling an op written in Python costs compared with one of PyTorch's."""

MIN_BLOCK_ELEMS = MIN_ELEMS // 8
"""The same for all channels of a dense block: one call there, and no concatenation is written for any of its layers."""

MIN_PRODUCTS = 1 << 24
"""Multiplications of a direct 3 x 3 convolution from which on the native Winograd one is worth its call by itself."""


class FusionSize:
    """Decides for one network, at every call, which of its fused layers run as such.

    Args:
        when: "always", or "pays": by the numbers above, in eager mode on the CPU, and not in eager mode elsewhere. A
            compiler, a capture or a dispatch mode that watches gets the op, whose call costs nothing there. Neither in
            an empty batch, where there is nothing to measure. "large": by the CPU's numbers everywhere, for a planner
            that compares the two.
        most_elems: elements of a map, or of all channels of a dense block, beyond which the answer is no; None for any
            number: the passes over the largest maps need most memory where they are fused.

    Attributes:
        fusions: how often the answer was yes in eager mode. It only grows, so that whoever compares it before and after
            a forward pass misses none while other threads run one. A compiler counts nothing: it would guard the
            number, and compile again as soon as that has changed.
        all_large: whether every map was, of those that were asked about: "large" then answers as "always" does.
    """

    def __init__(self, when: When, most_elems: int | None = None) -> None:
        self.when = when
        self.most_elems = most_elems
        self.fusions = 0
        self.all_large = True

    def fuses(self, x: torch.Tensor, elems: int | None = None, min_elems: int | None = None) -> bool:
        """Whether a batch norm of `elems` elements, by default those of `x`, is done by its neighbours.

        `min_elems` stands in for `MIN_ELEMS`.

        >>> FusionSize("pays").fuses(torch.ones(1, 8, 4, 4)), FusionSize("always").fuses(torch.ones(1, 8, 4, 4))
        (False, True)
        """
        if x.numel() == 0:
            return False
        least = MIN_ELEMS if min_elems is None else min_elems
        elems = x.numel() if elems is None else elems
        if not torch.compiler.is_compiling():
            self.all_large &= elems >= least
        if self.most_elems is not None and elems > self.most_elems:
            return False
        if self.when == "large":
            return elems >= least
        if torch.compiler.is_compiling():
            return True
        found = self.when == "always" or (x.is_cpu and elems >= least) or needs_dispatch((x,))
        self.fusions += found
        return found

    def is_quick(
        self, xs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, window: ConvWindow
    ) -> bool:
        """Whether a convolution of `xs` side by side is so much faster as `norm_conv` that this pays for its call.

        A compiler, which pays for no call, is not asked: it could not look into the native library either.

        >>> window = ConvWindow([1, 1], [1, 1], [1, 1], 1)
        >>> FusionSize("pays").is_quick([torch.ones(1, 8, 4, 4)], torch.ones(8, 8, 3, 3), None, window)
        False
        """
        if torch.compiler.is_compiling() or self.when == "large":
            return False
        x = xs[0]
        found = (
            len(xs) == 1
            and x.numel() * weight.shape[0] * 9 >= MIN_PRODUCTS
            and runs_winograd(x, weight, bias, window)
            and not torch.is_autocast_enabled("cpu")
        )
        self.fusions += found
        return found
