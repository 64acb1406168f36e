"""Frozen dataclasses from JSON that may be damaged: every value is checked against the type of its field.

read_record(Link, {"name": "bus", "to_host_bytes_per_second": "fast", ...}, "link")
InputError: link.to_host_bytes_per_second is 'fast', expected a finite number
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shoal.errors import InputError, brief

Record = TypeVar("Record")
MAX_WHOLE = 2**63 - 1


def read_json(path: str | Path) -> Any:
    """What the JSON file holds.

    Raises:
        OSError: it cannot be read.
        InputError: it is not JSON: cut, damaged, nested too deeply, or another kind of file.
    """
    content = Path(path).read_bytes()
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else brief(str(error))
        raise InputError(f"it is no JSON: {reason}") from None


def read_record(kind: type[Record], value: Any, where: str) -> Record:
    """The dataclass `kind` whose `asdict` was written as JSON.

    Fields may be int, float, bool, str, a Literal of texts, a dataclass, None or one of these, and a tuple of any
    number of one of these. An int has 63 bits, a float is finite, a text can be written as UTF-8. A field with a
    default may be absent.

    Args:
        kind: a dataclass.
        value: as `json.loads` gives it.
        where: what it is called in errors.

    Raises:
        InputError: a field is absent, unknown or of another type, or `kind` itself refuses what it is given.
    """
    value = read_object(value, where)
    known = _fields(kind)  # type: ignore[arg-type]  # a class is hashable, whatever its metaclass might do
    if unknown := value.keys() - known.keys():
        raise InputError(f"{where} has an unknown key {brief(min(unknown))}")
    given: dict[str, Any] = {}
    for name, (field, hint) in known.items():
        if name in value:
            given[name] = read_value(hint, value[name], f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where} has no {name!r}")
    return kind(**given)


def read_value(hint: Any, value: Any, where: str) -> Any:
    """A single value of one of the types that `read_record` knows.

    >>> read_value(float, 3, "seconds")
    3.0
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        (inner,) = (each for each in get_args(hint) if each is not NoneType)
        return None if value is None else read_value(inner, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise InputError(f"{where} is {brief(value)}, expected a list")
        inner = get_args(hint)[0]
        return tuple(read_value(inner, each, f"{where}[{place}]") for place, each in enumerate(value))
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise InputError(f"{where} is {brief(value)}, expected one of {', '.join(get_args(hint))}")
        return value
    if is_dataclass(hint):
        return read_record(hint, value, where)  # type: ignore[arg-type]  # mypy takes it for an instance
    expected, is_so = _PLAIN[hint]
    if not is_so(value):
        raise InputError(f"{where} is {brief(value)}, expected {expected}")
    return hint(value)


def read_object(value: Any, where: str) -> dict[str, Any]:
    """`value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise InputError(f"{where} is {brief(value)}, expected an object")
    return value


@cache
def _fields(kind: type) -> dict[str, tuple[Field[Any], Any]]:
    hints = get_type_hints(kind)
    return {field.name: (field, hints[field.name]) for field in fields(kind)}


def _is_whole(value: Any) -> bool:
    return type(value) is int and -MAX_WHOLE <= value <= MAX_WHOLE


def _is_finite(value: Any) -> bool:
    return _is_whole(value) or (type(value) is float and isfinite(value))


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True


_PLAIN: dict[Any, tuple[str, Any]] = {
    int: ("a whole number of at most 63 bits", _is_whole),
    float: ("a finite number", _is_finite),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a text", _is_text),
}
