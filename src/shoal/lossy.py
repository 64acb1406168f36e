"""What a caller permits when they say `lossy=`: which activations may wait in 8 bits a value, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal import codecs
from shoal.errors import CodecError, InputError

PLANNER = "joint"  # the one that looks for what to encode
CODECS = ("dynamic_tree", "dynamic_tree_even", "static_tree", "mantissa", "linear")
EXEMPTIONS = frozenset({"batch_norm", "first_layer"})
_OPTIONS = ("codec", "block", "stochastic", "exempt")
_DEFAULT_BLOCK_ELEMS = 4096


@dataclass(frozen=True)
class Lossy:
    """Convolution inputs may wait encoded.

    Attributes:
        codec: one of `CODECS`.
        block_elems: values that share a scale; 0 for all of a tensor.
        seed: None rounds to nearest; a number rounds by chance, unbiased.
        exempt: of `EXEMPTIONS`: inputs of batch norms, whose backward pass then reads exact values, and what comes
            before the first convolution.
    """

    codec: str
    block_elems: int = _DEFAULT_BLOCK_ELEMS
    seed: int | None = None
    exempt: frozenset[str] = EXEMPTIONS

    def describe(self) -> str:
        """For people: codec, blocks, rounding.

        >>> Lossy("dynamic_tree", 2048, seed=1).describe()
        'dynamic_tree in blocks of 2048, rounded stochastically'
        """
        blocks = f"in blocks of {self.block_elems}" if self.block_elems else "with one scale a tensor"
        return f"{self.codec} {blocks}" + ("" if self.seed is None else ", rounded stochastically")


def lossy_of(value: str | Mapping[str, Any] | Lossy | None, planner: Any = PLANNER) -> Lossy | None:
    """What `lossy=` of `shoal.compile` and `shoal.plan` stands for; None permits nothing.

    Args:
        value: a codec's name, or a mapping with "codec" and, where wanted, "block" (values that share a scale; None for
            all of a tensor), "stochastic" (a seed) and "exempt" (which of "batch_norm", "first_layer" stay exact; by
            default both).
        planner: who will plan.

    Raises:
        CodecError: no codec of that name is for activations.
        InputError: an option is none of these, or the planner does not look for what to encode.

    >>> lossy_of({"codec": "dynamic_tree", "block": 2048}).block_elems
    2048
    """
    if value is None:
        return None
    if planner != PLANNER:
        name = planner if isinstance(planner, str) else getattr(planner, "__name__", "yours")
        raise InputError(
            f"lossy needs planner={PLANNER!r}; {name!r} does not look for what to encode: leave out one of the two"
        )
    if isinstance(value, Lossy):
        return value
    if isinstance(value, str):
        value = {"codec": value}
    if not isinstance(value, Mapping) or "codec" not in value:
        raise InputError(
            f"lossy={value!r}: expected a codec's name, or a mapping with 'codec' and options; codecs for activations "
            f"are {', '.join(CODECS)}"
        )
    if unknown := sorted(set(value) - set(_OPTIONS), key=str):
        raise InputError(f"lossy has no options {unknown}; there are {', '.join(_OPTIONS)}")
    return Lossy(
        _codec(value["codec"]),
        _block_elems(value.get("block", _DEFAULT_BLOCK_ELEMS)),
        _seed(value.get("stochastic")),
        _exempt(value.get("exempt", EXEMPTIONS)),
    )


def _codec(name: Any) -> str:
    if name in CODECS:
        return str(name)
    what = "is not for activations" if name in codecs.names() else "is unknown"
    raise CodecError(f"lossy: the codec {name!r} {what}; give one of {', '.join(CODECS)}")


def _block_elems(block: Any) -> int:
    if block is None:
        return 0
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise InputError(f"lossy: block={block!r}; expected a number of values of at least 1, or None for all")
    return block


def _seed(seed: Any) -> int | None:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise InputError(f"lossy: stochastic={seed!r}; expected a seed, an int of at least 0, or None to round")
    return seed


def _exempt(names: Any) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Iterable) or not (found := frozenset(names)) <= EXEMPTIONS:
        raise InputError(f"lossy: exempt={names!r}; expected some of {', '.join(sorted(EXEMPTIONS))}, or none: ()")
    return found
