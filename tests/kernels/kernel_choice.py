"""Which kernels run in a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.lowlevel.dispatch import VARIABLE


@contextmanager
def only(words: str) -> Iterator[None]:
    """SHOAL_KERNELS is `words`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, words)
        yield
