"""By which means a step may be brought into its budget: `allow=`.

>>> sorted(means_of("bitwise"))
['offload', 'order', 'pieces', 'recompute']
>>> sorted(means_of("exact, encode") - means_of("exact"))
['encode']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.errors import InputError, brief

BITWISE = frozenset({"recompute", "offload", "order", "pieces"})
"""They give the bits that plain PyTorch gives."""
EXACT = BITWISE | {"fuse", "exact_split", "direct"}
"""They compute the same function, to rounding."""
LOSSY = EXACT | {"encode", "split", "invert"}
"""All that there are."""
KERNEL_MEANS = frozenset({"pieces", "direct"})
"""Those that choose how a convolution is computed."""
_SETS = {"keep": frozenset[str](), "bitwise": BITWISE, "exact": EXACT, "lossy": LOSSY}
_DESCRIBED = (
    f"some of {', '.join(sorted(LOSSY))}; or 'keep' for none of them, 'bitwise' for those that give PyTorch's own "
    "bits, 'exact' for those that compute the same function, 'lossy' for all"
)


def means_of(allow: str | Iterable[str], named: str = "allow") -> frozenset[str]:
    """The means that `allow=` stands for.

    Args:
        allow: names of means or of sets of them, as a text with commas or as a collection.
        named: where they were given, for errors.

    Raises:
        InputError: a name is unknown, there is none, or 'keep' stands together with others.
    """
    names = _names(allow, named)
    found: set[str] = set()
    for name in names:
        if not isinstance(name, str) or name not in _SETS.keys() | LOSSY:
            raise InputError(f"{named} has an unknown name {brief(name)}; expected {_DESCRIBED}")
        found |= _SETS.get(name, {name})
    if not names:
        raise InputError(f"{named} is empty; expected {_DESCRIBED}")
    if "keep" in names and found:
        raise InputError(f"{named} has 'keep', which is none of the means, with {brief(sorted(found))}; leave it out")
    return frozenset(found)


def single_means(allow: str | Iterable[str], named: str = "allow") -> frozenset[str]:
    """The means that `allow=` names by themselves, and not in a set of them.

    >>> sorted(single_means("bitwise, fuse"))
    ['fuse']
    """
    return means_of(allow, named).intersection(map(str, _names(allow, named)))


def _names(allow: str | Iterable[str], named: str) -> list[object]:
    if isinstance(allow, str):
        return [name.strip() for name in allow.split(",")]
    if isinstance(allow, Iterable) and not isinstance(allow, Mapping):
        return list(allow)
    raise InputError(f"{named}={brief(allow)}: expected {_DESCRIBED}")
