"""No test leaves a thread behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.runtime.links.slabs import our_threads


@pytest.fixture(scope="module", autouse=True)
def _collecting_is_quick() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what was imported is garbage to no test
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_test_leaves_a_thread() -> Iterator[None]:
    yield
    gc.collect()
    assert our_threads() == []
