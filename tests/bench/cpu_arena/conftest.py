"""An arena that is closed after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.cpu_arena.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena() as opened:
        yield opened
