"""Errors in tests: by class, by attributes and by what they name. No test holds the sentence of an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raising(kind: type[BaseException] | tuple[type[BaseException], ...], *names: object) -> Iterator[Any]:
    """As `pytest.raises`; and the error's text has each of `names`: an argument, a layer, a size, a path."""
    with pytest.raises(kind) as caught:
        yield caught
    text = " ".join(str(caught.value).split())  # a long line is broken
    del caught  # this frame is part of the traceback, which would keep the tensors of the others
    missing = [name for name in map(str, names) if " ".join(name.split()) not in text]
    assert not missing, f"{missing} not in: {text}"
