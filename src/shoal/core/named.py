"""Functions named in text: FILE.py:FUNCTION, or MODULE:FUNCTION for what Python can import from here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import InputError

_EXPECTED = "expected FILE.py:FUNCTION or MODULE:FUNCTION, such as train.py:make_model"


def function_named(where: str) -> Callable[..., Any]:
    """The function or class that `where` names. Imports its file or module.

    Raises:
        InputError: there is no such file, module or function, or importing it raised.

    >>> function_named("math:sqrt")(9)
    3.0
    """
    place, _, name = where.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"{where}: {_EXPECTED}")
    function = getattr(_module_at(place), name, None)
    if not callable(function):
        raise InputError(f"{where}: {place} has no function {name}; {_EXPECTED}")
    return function


def described(error: BaseException) -> str:
    """An exception's class and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _module_at(place: str) -> ModuleType:
    path = Path(place)
    try:
        if path.suffix != ".py":
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        if not path.is_file():
            raise InputError(f"{place}: no such file; {_EXPECTED}")
        path = path.resolve()
        known = sys.modules.get(path.stem)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
        sys.path.insert(0, str(path.parent))  # for what it imports from its own folder, as when it is run
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever importing a user's file raises
        raise InputError(f"{place} cannot be imported: {described(error)}") from error
