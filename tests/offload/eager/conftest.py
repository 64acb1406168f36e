"""No test leaves a thread running."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.offload.eager.networks import module
from tests.offload.links.slabs import forget_threads, our_threads


@pytest.fixture(autouse=True)
def _no_test_leaves_a_thread() -> Iterator[None]:
    forget_threads()
    yield
    for link in module._links.values():
        link.close()
    module._links.clear()
    gc.collect()
    assert our_threads() == []
