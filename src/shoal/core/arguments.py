"""What a caller gave for an argument, refused by name unless it is of the type asked for.

A value of any type may come: a tensor has no truth value, an array compares by element, an int may be too large for a
float. So the type is checked before the value is compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from pathlib import Path

import numpy

from shoal.errors import InputError, brief


def one_of(name: str, value: object, known: Collection[str | None], note: str = "") -> None:
    """Refuse what is none of some texts, or None if that is among them.

    >>> one_of("halo", 1, ("exact", None))
    Traceback (most recent call last):
    shoal.errors.InputError: halo=1: expected 'exact' or None
    """
    if not isinstance(value, str | None) or value not in known:
        *others, last = map(repr, known)
        listed = f"{', '.join(others)} or {last}" if others else last
        raise InputError(f"{name}={brief(value)}: expected {listed}{note}")


def instance(name: str, value: object, *kinds: type, note: str = "") -> None:
    """Refuse what is of none of some types.

    >>> instance("model", 1, dict)
    Traceback (most recent call last):
    shoal.errors.InputError: model is a int; expected a dict
    """
    if not isinstance(value, kinds):
        expected = " or ".join(_named(kind) for kind in kinds)
        raise InputError(f"{name} is a {type(value).__name__}; expected a {expected}{note}")


def switch(name: str, value: object) -> bool:
    """A switch, as a bool or as text.

    >>> switch("strict", "true")
    True
    """
    if isinstance(value, bool | numpy.bool_):
        return bool(value)
    if isinstance(value, Integral) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InputError(f"{name}={brief(value)}: expected True or False")


def is_number(value: object) -> bool:
    """Whether a value is a finite real number.

    >>> is_number(0.5), is_number(10**400), is_number(True)
    (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def positive(name: str, number: object) -> int:
    """A number of something, at least 1."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise InputError(f"{name}={brief(number)}: expected a positive int")
    return int(number)


def sizes(name: str, given: object, dims: int = 0) -> tuple[int, ...]:
    """Positive ints, one for each dimension.

    Args:
        name: of the argument.
        given: for it.
        dims: how many there have to be; 0 for any number.

    >>> sizes("patch", [64, 64])
    (64, 64)
    """
    right = isinstance(given, Sequence) and not isinstance(given, str | bytes) and all(map(_is_positive, given))
    if not right or not given or (dims and len(given) != dims):  # type: ignore[arg-type]
        such_as = ", ".join(("64", "128", "128")[-dims:]) + ("," if dims == 1 else "")
        raise InputError(f"{name}={brief(given)}: expected {dims or 'a few'} positive ints, such as ({such_as})")
    return tuple(int(n) for n in given)  # type: ignore[attr-defined]


def path(name: str, given: object) -> Path:
    """A path that the operating system can be asked for."""
    if not isinstance(given, str | os.PathLike):
        raise InputError(f"{name} is a {type(given).__name__}; expected a text or a pathlib.Path")
    found = Path(given)
    try:
        is_one = b"\0" not in os.fsencode(found)
    except UnicodeEncodeError:  # half of a pair of surrogates
        is_one = False
    if not is_one:
        raise InputError(f"{name}={brief(str(found))}: no file can have this name; give another")
    return found


def callback(name: str, function: object) -> None:
    """Refuse what cannot be called."""
    if not callable(function):
        raise InputError(f"{name}={brief(function)}: expected a function of what is tried, such as print")


def _named(kind: type) -> str:
    public = next((name for name in ("torch.nn", "torch.optim") if kind.__module__.startswith(f"{name}.")), "")
    return f"{public}.{kind.__name__}" if public else kind.__name__


def _is_positive(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) > 0
