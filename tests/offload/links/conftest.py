"""A test of links sees the threads of its own."""

from __future__ import annotations

import pytest

from tests.offload.links.slabs import forget_threads


@pytest.fixture(autouse=True)
def _no_thread_of_another_test() -> None:
    forget_threads()
