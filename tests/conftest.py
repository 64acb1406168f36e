"""What every test runs under, so that each run of the suite is the same: one thread, fixed seeds, a made-up machine."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import register_random, settings
from hypothesis.internal.conjecture import providers

from shoal.core.files import cache_dir
from shoal.engine import metering
from shoal.memory.cpu_allocator import stop_caching
from tests import beside_compiling, made_up_machine
from tests.few_variants import few_variants
from tests.made_up_machine import real_machine

__all__ = ["few_variants", "real_machine"]

# A law draws the same examples every time, with "fresh" others each time, with "thorough" many others. What failed once
# is not tried first the next time, and a busy machine is not a reason to fail.
settings.register_profile("usual", derandomize=True, database=None, deadline=None, max_examples=30)
settings.register_profile("fresh", derandomize=False, database=None, deadline=None, max_examples=30, print_blob=True)
settings.register_profile(
    "thorough", derandomize=False, database=None, deadline=None, max_examples=1000, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))

# Hypothesis also draws constants that it finds in the modules imported so far, which depend on the tests run before. It
# looks for them, too, whenever tests are collected: a second of each worker.
_NO_CONSTANTS = providers.Constants()
providers._get_local_constants = lambda: _NO_CONSTANTS

made_up_machine.put_in_place()
os.environ["SHOAL_CHECK_PLANS"] = "1"  # Shoal's own plans are held against the rules before they run
# Pytest hangs its handlers on every logger that passes nothing on, six times a test. Torch has sixty of them, and with
# a handler one would write down all that torch.compile traces.
for _logger in logging.root.manager.loggerDict.values():
    if isinstance(_logger, logging.Logger):
        _logger.propagate = True
        _logger.handlers.clear()
        if 0 < _logger.level < logging.WARNING:
            _logger.setLevel(logging.WARNING)
beside_compiling.leave_out()
# Each capture makes and drops a hundred thousand objects: collecting them at every 700 was a tenth of its time.
gc.set_threshold(50_000, 20, 20)
# `torch.manual_seed` notes a traceback for each kind of device that is not here: a millisecond.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None


class _TorchGenerator:
    """PyTorch's own generator, for Hypothesis: an example is what was drawn, not also what earlier ones used up."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> Any:
        return torch.get_rng_state()

    def setstate(self, state: Any) -> None:
        torch.set_rng_state(state)


_TORCH = _TorchGenerator()  # Hypothesis holds it weakly
register_random(_TORCH)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not what other runs have measured; but what is compiled, under a name that tells its source, is compiled once."""
    built, own = cache_dir() / "native", tmp_path_factory.mktemp("cache")
    built.mkdir(exist_ok=True)
    (own / "native").symlink_to(built)
    os.environ["SHOAL_CACHE"] = str(own)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tests are small and share their machine: a second thread would mostly wait.
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _collecting_is_quick() -> None:
    gc.collect()
    gc.freeze()  # what earlier modules left and imported is garbage to no test of this one


@pytest.fixture(scope="module", autouse=True)
def _torchs_allocator() -> Iterator[None]:
    yield
    stop_caching()  # `shoal train` has switched it on


@pytest.fixture(autouse=True)
def _same_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    metering.abandon()  # a forward pass that a test never sent back
    torch._dynamo.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with slow tests come first: one that began last would leave the other workers without work.
    with_slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in with_slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
