"""The codec of each parameter's weights: a fixed width, a codec by name, or what `AdaptivePrecision` decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shoal.codecs.codec import Codec
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.registry import get
from shoal.core import arguments
from shoal.distributed.comm.agreement import described, short_hash
from shoal.distributed.comm.traffic import Kind, Traffic
from shoal.distributed.weights.precision import AdaptivePrecision, packable
from shoal.errors import InputError, brief

RAW_BYTES = 4  # a float32
_VERBS = {"cut": "truncate", "nearest": "round"}
_FIXED_BITS = (8, 16, 24, 32)


class WeightCodecs:
    """Read what a caller asks for.

    Args:
        model: whose weights they are; biases and normalisations are never packed.
        precision: 8, 16, 24 or 32 bits for every weight (32 is the baseline, the best of the others the paper's
            oracle); the name of a codec, such as "bf16"; or an `AdaptivePrecision`.
        rounding: of 8, 16 and 24 bits: "cut" (the paper) or "nearest".
        one_byte: the codec that stands in for 8 bits, such as "dynamic_tree"; None: the top byte, by `rounding`.

    Attributes:
        packs: the names of the weights that may be packed.
        adaptive: what decides while training, if anything does.

    Raises:
        InputError: one of them is none of these.
        CodecError: there is no such codec.

    >>> model = torch.nn.Linear(4, 2)
    >>> WeightCodecs(model, 16).codec("weight").name, WeightCodecs(model, 16).codec("bias")
    ('truncate2', None)
    >>> WeightCodecs(model, 8, one_byte="dynamic_tree").codec("weight").name
    'dynamic_tree'
    """

    def __init__(
        self,
        model: torch.nn.Module,
        precision: int | str | AdaptivePrecision,
        rounding: str = "cut",
        one_byte: str | None = None,
    ) -> None:
        arguments.one_of("rounding", rounding, _VERBS)
        self.packs = frozenset(packable(model))
        self.adaptive = precision if isinstance(precision, AdaptivePrecision) else None
        self._by_bytes: dict[int, Codec | None] = {
            width: get(f"{_VERBS[rounding]}{width}") for width in range(1, RAW_BYTES)
        }
        self._by_bytes[RAW_BYTES] = None
        if one_byte is not None:
            self._by_bytes[1] = _of_8_bits(one_byte)
        self._rounding = rounding
        self._fixed: Codec | None = None
        if isinstance(precision, str):
            self._fixed = get(precision)
        elif not isinstance(precision, AdaptivePrecision):
            if type(precision) is not int or precision not in _FIXED_BITS:
                raise InputError(
                    f"precision={brief(precision)}: expected 8, 16, 24 or 32 bits, a codec's name or an "
                    "AdaptivePrecision"
                )
            self._fixed = self._by_bytes[precision // 8]

    def codec(self, name: str) -> Codec | None:
        """Of the weights of this name, now; None for plain float32."""
        if name not in self.packs:
            return None
        if self.adaptive is None:
            return self._fixed
        return self._by_bytes[self.adaptive.bytes_of(name)] if self.adaptive.watches(name) else None

    def settings(self) -> dict[str, object]:
        """What all ranks must have alike, AWP's state included, in words.

        >>> WeightCodecs(torch.nn.Linear(4, 2), 16).settings()
        {'precision': 'truncate2()'}
        """
        if self.adaptive is None:
            return {"precision": described(self._fixed) if self._fixed is not None else "float32"}
        layers, state = self.adaptive, self.adaptive.state_dict()
        return {
            "precision": "adaptive",
            "rounding": self._rounding,
            "one_byte": described(self._by_bytes[1]),
            "threshold": layers.threshold,
            "interval": layers.interval,
            "bits_step": layers.bits_step,
            "bits": f"{self.adaptive.mean_bytes:g} bytes a weight, hash {short_hash(state)}",
        }

    def state_dict(self) -> dict[str, Any]:
        """AWP's state, plain numbers; nothing of a fixed width."""
        return {"adaptive": None if self.adaptive is None else self.adaptive.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            InputError: the state is of other layers, or of a run with another kind of precision.
        """
        found = state.get("adaptive")
        if (found is None) != (self.adaptive is None):
            raise InputError("the state and this run differ in adaptive precision; resume with the same arguments")
        if self.adaptive is not None and found is not None:
            self.adaptive.load_state_dict(found)

    def max_bytes(self, elems: int) -> int:
        """Of any payload of that many weights, whatever is decided later."""
        codecs = list(self._by_bytes.values()) if self.adaptive is not None else [self._fixed]
        return max((codec.payload_bytes(elems) for codec in codecs if codec is not None), default=0)


def explained(weights: Iterable[tuple[Codec | None, int]], traffic: Traffic, kinds: Iterable[Kind]) -> str:
    """The width of weights, and the bytes of the last step, a line each.

    Args:
        weights: the codec of each parameter, None for plain float32, and how many values it has.
        traffic: of them.
        kinds: of the traffic, to list.

    >>> explained([(get("bf16"), 300), (None, 100)], Traffic(), ())
    'bf16: 75.0 % of 400 weights\\nfloat32: 25.0 % of 400 weights'
    """
    by_codec: dict[str, int] = {}
    for codec, elems in weights:
        name = "float32" if codec is None else codec.name
        by_codec[name] = by_codec.get(name, 0) + elems
    total = sum(by_codec.values())
    lines = [f"{name}: {100 * elems / total:.1f} % of {total} weights" for name, elems in by_codec.items()]
    for kind in kinds:
        sent = traffic.last_step(kind)
        lines.append(f"{kind}: {sent.sent_bytes} bytes in the last step, {100 * sent.share:.1f} % of float32's")
    return "\n".join(lines)


def _of_8_bits(name: str) -> Codec:
    codec = get(name)
    if not isinstance(codec, FloatCodec) or codec.properties.bits_per_value != 8:
        raise InputError(f"one_byte={name!r}: expected a codec of 8 bits a value, such as 'dynamic_tree'")
    return codec
