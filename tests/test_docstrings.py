"""Every example of a docstring prints what it says."""

from __future__ import annotations

import doctest
import gc
import importlib
import pkgutil

import pytest

import shoal
from tests.runtime.links.slabs import forget_threads, our_threads

NATIVE = "shoal.libshoal_native"  # no Python module, though it looks like one
MODULES = [m.name for m in pkgutil.walk_packages(shoal.__path__, "shoal.") if m.name != NATIVE]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name: str) -> None:
    if name.endswith("_triton_kernels"):
        pytest.importorskip("triton", reason="Triton is not installed")
    forget_threads()
    assert doctest.testmod(importlib.import_module(name)).failed == 0
    gc.collect()
    assert our_threads() == []  # an example shows how to close what it opened
