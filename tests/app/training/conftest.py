"""The tiny network for every test here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.app.training.options import TrainOptions
from tests.app.training.tiny import put_in_place


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., TrainOptions]:
    """Arguments for runs of the tiny network."""
    return put_in_place(monkeypatch, tmp_path)
