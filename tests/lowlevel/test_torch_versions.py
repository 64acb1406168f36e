"""What is logged for a version of PyTorch that is newer than those tested."""

from __future__ import annotations

import logging

import pytest
import torch

from shoal.lowlevel.torch_versions import warn_if_untested


@pytest.mark.parametrize(
    ("version", "n_warnings"), [("2.12.1", 0), ("2.15.3+cu132", 0), ("2.16.0.dev20270101", 1), ("3.0.0a0+git1", 1)]
)
def test_a_newer_version_is_warned_of_once(
    version: str, n_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(2):
            warn_if_untested()
    warn_if_untested.cache_clear()
    assert len(caplog.messages) == n_warnings
