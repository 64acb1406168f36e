"""What every test runs under: one thread, a fixed seed, and no CUDA tests where there is no CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tests are small and share their machine: a second thread would mostly wait.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
