"""A search of few forms, each of which is captured: for tests of what becomes of the one that is found."""

from __future__ import annotations

import pytest

from shoal.engine.search import split_forms


@pytest.fixture
def few_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs on at most four slices of its batch, and on no patches."""
    monkeypatch.setattr(split_forms, "_PARTS", ())
    monkeypatch.setattr(split_forms, "_SLICES", (4,))
