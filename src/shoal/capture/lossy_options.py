"""What a caller permits when they say `lossy=`: which activations may wait in 8 bits a value, and how."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from shoal import codecs
from shoal.core.lossy import CODECS, DEFAULT_BLOCK_ELEMS, EXEMPTIONS, Lossy
from shoal.errors import CodecError, InputError, brief

PLANNER = "joint"  # the one that looks for what to encode
_OPTIONS = ("codec", "block", "stochastic", "exempt")


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
            f"lossy={brief(value)}: expected a codec's name, or a mapping with 'codec' and options; codecs for "
            f"activations are {', '.join(CODECS)}"
        )
    if unknown := sorted(set(value) - set(_OPTIONS), key=str):
        raise InputError(f"lossy has no options {brief(unknown)}; there are {', '.join(_OPTIONS)}")
    return Lossy(
        _codec(value["codec"]),
        _block_elems(value.get("block", DEFAULT_BLOCK_ELEMS)),
        _seed(value.get("stochastic")),
        _exempt(value.get("exempt", EXEMPTIONS)),
    )


def _codec(name: Any) -> str:
    if isinstance(name, str) and name in CODECS:
        return str(name)
    what = "is not for activations" if isinstance(name, str) and name in codecs.names() else "is unknown"
    raise CodecError(f"lossy: the codec {brief(name)} {what}; give one of {', '.join(CODECS)}")


def _block_elems(block: Any) -> int:
    if block is None:
        return 0
    if not isinstance(block, Integral) or isinstance(block, bool) or not 1 <= int(block) < 2**63:
        raise InputError(f"lossy: block={brief(block)}; expected a number of values of at least 1, or None for all")
    return int(block)


def _seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        raise InputError(f"lossy: stochastic={brief(seed)}; expected a seed from 0 to 2**63 - 1, or None to round")
    return int(seed)


def _exempt(names: Any) -> frozenset[str]:
    listed = isinstance(names, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in names)
    if not listed or not EXEMPTIONS.issuperset(names):
        raise InputError(f"lossy: exempt={brief(names)}; expected some of {', '.join(sorted(EXEMPTIONS))}, or none: ()")
    return frozenset(names)
