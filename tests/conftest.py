"""What every test runs under: one thread, a fixed seed, and no CUDA tests where there is no CUDA."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A busy machine is no reason to fail. Each run draws other examples; HYPOTHESIS_PROFILE=thorough draws many.
settings.register_profile("usual", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=1000)
os.environ["SHOAL_CHECK_PLANS"] = "1"  # Shoal's own plans are held against the rules before they run
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tests are small and share their machine: a second thread would mostly wait.
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _collecting_is_quick() -> None:
    gc.collect()
    gc.freeze()  # what earlier modules left and imported is garbage to no test of this one


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
