"""Adaptive Weight Precision: the number of bits in which each layer's weights are sent, from how their norms change.

Zhuang, Malossi, Casas, "Reducing data motion to accelerate the training of deep neural networks" (A2DTWP), algorithm 1.
A layer's weights start in few bits. After every batch the change of their l2 norm, delta = (|W_i| - |W_i-1|) / |W_i-1|,
is compared with a threshold T, which is negative in the paper: "below" means that the norm falls faster than |T|. Once
that happened in INTERVAL batches since the count was last reset, the layer gets N bits more and the count is reset.
Bits never decrease.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core import arguments
from shoal.errors import InputError, brief

MAX_BITS = 32  # of a float32


class LayerBits:
    """Algorithm 1 over named layers, fed with norms.

    Args:
        names: of the layers.
        threshold: T, a relative change of the norm; in the paper -5e-2 (AlexNet), -2e-3 (VGG) and -2e-5 (ResNet).
        interval: INTERVAL, in batches; 4000 (AlexNet, VGG) and 2000 (ResNet) in the paper.
        bits_step: N, bits that a layer gets when it needs more.
        first_bits: of every layer at the start.

    Attributes:
        bits: of each layer, from 1 to 32.
        counts: IntervalCounter of each layer.

    Raises:
        InputError: a number is out of its range, or two layers have one name.

    >>> layers = LayerBits(["conv", "dense"], threshold=-0.01, interval=2)
    >>> for conv_norm in (10.0, 9.0, 8.0):
    ...     grown = layers.observe([conv_norm, 5.0])
    >>> grown, layers.bits
    (['conv'], {'conv': 16, 'dense': 8})

    Limits: the first batch seen has none before it and is only remembered.
    """

    def __init__(
        self, names: Sequence[str], *, threshold: float, interval: int, bits_step: int = 8, first_bits: int = 8
    ) -> None:
        if not arguments.is_number(threshold):
            raise InputError(
                f"threshold={brief(threshold)}: expected a finite number, negative in the paper, such as -2e-3"
            )
        for what, number in (("interval", interval), ("bits_step", bits_step), ("first_bits", first_bits)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError(f"{what}={number!r}: expected a whole number of 1 or more")
        if first_bits > MAX_BITS:
            raise InputError(f"first_bits={first_bits}: expected at most {MAX_BITS}, the bits of a float32")
        if len(set(names)) != len(names):
            raise InputError(f"layers {list(names)}: expected each name once; rename one")
        self.threshold = threshold
        self.interval = interval
        self.bits_step = bits_step
        self.bits = dict.fromkeys(names, first_bits)
        self.counts = dict.fromkeys(names, 0)
        self._norms: dict[str, float] | None = None

    def observe(self, norms: Sequence[float]) -> list[str]:
        """What follows from the norms after a batch.

        Args:
            norms: l2 norm of each layer, in the order of the names.

        Returns:
            The layers whose bits went up. A norm that is NaN never counts; one that leaves zero rises.

        Raises:
            InputError: there are more or fewer norms than layers.
        """
        if len(norms) != len(self.bits):
            raise InputError(f"got {len(norms)} norms, expected {len(self.bits)}: one of each layer")
        now = dict(zip(self.bits, map(float, norms), strict=True))
        before, self._norms = self._norms, now
        grown: list[str] = []
        if before is None:
            return grown
        for name in now:
            if relative_change(before[name], now[name]) < self.threshold:
                self.counts[name] += 1
            if self.counts[name] == self.interval:
                self.counts[name] = 0
                if self.bits[name] < MAX_BITS:
                    # A new dictionary: one that was read before stays that of its batch.
                    self.bits = self.bits | {name: min(MAX_BITS, self.bits[name] + self.bits_step)}
                    grown.append(name)
        return grown

    def bytes_of(self, name: str) -> int:
        """Bits rounded up to whole bytes, 1 to 4.

        Raises:
            InputError: there is no such layer.
        """
        if name not in self.bits:
            raise InputError(f"no layer is called {name!r}; there are {', '.join(self.bits) or 'none'}")
        return -(-self.bits[name] // 8)

    def state_dict(self) -> dict[str, Any]:
        """Bits, counts and the last norms of every layer: plain numbers."""
        return {"bits": dict(self.bits), "counts": dict(self.counts), "norms": self._norms and dict(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            InputError: the state is of other layers.
        """
        try:
            bits, counts, norms = state["bits"], state["counts"], state["norms"]
            same = set(bits) == set(counts) == set(self.bits) and (norms is None or set(norms) == set(self.bits))
        except (KeyError, TypeError) as error:
            raise InputError(f"got a state without {error}; give what state_dict() returned") from error
        if not same:
            missing = sorted(set(self.bits) ^ set(bits))
            raise InputError(f"the state is of other layers ({', '.join(missing[:3])}); load it into the same model")
        self.bits = {name: int(bits[name]) for name in self.bits}
        self.counts = {name: int(counts[name]) for name in self.bits}
        self._norms = None if norms is None else {name: float(norms[name]) for name in self.bits}


def relative_change(before: float, now: float) -> float:
    """(now - before) / before; from zero 0 or infinite.

    >>> relative_change(10.0, 9.0)
    -0.1
    """
    if before == 0.0:
        return 0.0 if now == 0.0 else math.inf
    return (now - before) / before
