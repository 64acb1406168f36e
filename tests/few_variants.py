"""A search of few variants, each of which is captured: for tests of what becomes of the one that is found."""

from __future__ import annotations

import pytest

from shoal.engine.search import split_variants


@pytest.fixture
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs on at most four slices of its batch, and on no patches."""
    monkeypatch.setattr(split_variants, "_PARTS", ())
    monkeypatch.setattr(split_variants, "_SLICES", (4,))
