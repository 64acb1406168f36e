"""These tests need a CUDA device; `make test-cuda-standin` gives them one that is not there."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "SHOAL_CUDA_STANDIN" in os.environ:
        return
    skip = pytest.mark.skip(reason="needs the stand-in for a CUDA device: make test-cuda-standin")
    for item in items:
        if "cuda_standin" in str(item.path):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def kernels_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled that is not asked for: compilers take long, and here their code does nothing."""
    monkeypatch.setattr(
        "shoal.engine.compile_options.CompileOptions.compiles", lambda options, _: options.kernels == "compiled"
    )
