"""Arguments of `shoal.compile` and its like, written as one mapping."""

from __future__ import annotations

from inspect import signature
from typing import Any

import shoal

_OF_ALL = {
    name for each in (shoal.compile, shoal.plan, shoal.fit, shoal.frontier) for name in signature(each).parameters
}


def keywords(given: dict[str, Any]) -> dict[str, Any]:
    """The same, the options among them as `options=`."""
    apart = {name: value for name, value in given.items() if name not in _OF_ALL}
    rest = {name: value for name, value in given.items() if name in _OF_ALL}
    return rest | ({"options": shoal.Options(**apart)} if apart else {})
