"""One window operation along one dimension, split: which input a patch of outputs reads, and how it is padded.

Split-CNN, section 3.1, for any kernel k, stride s, dilation d and padding (p_b, p_e). Output o reads the kernel taps at
o*s - p_b, ..., o*s - p_b + d*(k - 1). Where the output is cut at O, the input may be cut anywhere between

    lb = O*s - p_b        (the first row that the patch after the cut reads) and
    ub = (O - 1)*s + d*(k - 1) + 1 - p_b      (one past the last row that the patch before the cut reads),

and a patch with inputs [I, I') and outputs [O, O') is padded by I + p_b - O*s in front (the paper prints (O - 1)*s,
which is off by one stride) and (O' - 1)*s + d*(k - 1) + 1 - p_b - I' after. Negative padding is cropping of rows that
nothing reads. Where k < s the two bounds change places, and any cut between them loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlidingWindow:
    """A window operation along one dimension. All lengths are in elements.

    Attributes:
        kernel: k, taps of the window.
        stride: s.
        dilation: d, from one tap to the next.
        begin, end: p_b and p_e, the padding before and after.
        ceil: a last window that begins inside the input or its front padding counts even where it reaches beyond the
            padding after (pooling's `ceil_mode`).
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    begin: int = 0
    end: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Rows from the first tap to the last: d*(k - 1) + 1."""
        return self.dilation * (self.kernel - 1) + 1

    def out_length(self, length: int) -> int:
        """How many windows an input of `length` has.

        >>> SlidingWindow(3, 2, begin=1, end=1).out_length(224)
        112
        """
        span = length + self.begin + self.end - self.reach
        if span < 0 and not self.ceil:
            return 0
        if not self.ceil:
            return span // self.stride + 1
        windows = -(-span // self.stride) + 1
        if (windows - 1) * self.stride >= length + self.begin:
            windows -= 1
        return max(0, windows)

    @property
    def cuts(self) -> tuple[int, int]:
        """The minimum and the maximum of I - s*O that lose nothing, for an output cut at O and an input cut at I.

        >>> SlidingWindow(3, 1, begin=1, end=1).cuts, SlidingWindow(1, 2).cuts
        ((-1, 1), (-1, 0))
        """
        before, after = -self.begin, self.reach - self.stride - self.begin
        return min(before, after), max(before, after)

    def padding(self, inputs: tuple[int, int], outputs: tuple[int, int]) -> tuple[int, int]:
        """Padding of the patch that reads `inputs` and writes `outputs`, both from..to; negative is cropping.

        >>> SlidingWindow(3, 2, begin=1, end=1).padding((16, 32), (8, 16))
        (1, 0)
        """
        begin = inputs[0] + self.begin - outputs[0] * self.stride
        end = (outputs[1] - 1) * self.stride + self.reach - self.begin - inputs[1]
        return begin, end

    def reads(self, outputs: tuple[int, int], length: int) -> tuple[int, int]:
        """The rows of an input of `length` that `outputs` read.

        >>> SlidingWindow(3, 1, begin=1, end=1).reads((8, 16), 16)
        (7, 16)
        """
        first = outputs[0] * self.stride - self.begin
        last = (outputs[1] - 1) * self.stride - self.begin + self.reach
        return max(0, first), min(length, last)
