"""What a program finds in `shoal` itself."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import shoal
import shoal.kernels
from shoal import errors
from shoal.core.plan import Plan


def test_every_public_name_is_there() -> None:
    assert shoal.__all__ == sorted(set(shoal.__all__))
    assert all(hasattr(shoal, name) for name in shoal.__all__)


@pytest.mark.parametrize(
    "name",
    [name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__],
)
def test_every_exception_can_be_caught_by_its_public_name(name: str) -> None:
    assert name in shoal.__all__ and getattr(shoal, name) is getattr(errors, name)


def test_a_plan_can_be_loaded_by_its_public_name() -> None:
    assert "Plan" in shoal.__all__ and shoal.Plan is Plan


def test_there_are_fifteen_names_beside_the_exceptions() -> None:
    names = {name for name in shoal.__all__ if not name.endswith("Error")}
    assert names == {
        "Budget",
        "Options",
        "Plan",
        "codecs",
        "compile",
        "distributed",
        "errors",
        "fit",
        "frontier",
        "fuse_batchnorm",
        "invert_norm",
        "offload_activations",
        "plan",
        "split",
        "use_caching_allocator",
    }


def test_a_new_process_that_imports_shoal_has_all_its_ops_but_nothing_that_compiles() -> None:
    program = """
import json, sys
import shoal.app.cli, shoal.app.data, shoal.distributed  # a process that prints help, or loads images
import torch
print(json.dumps([sorted(torch._C._dispatch_get_all_op_names()), sorted(sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    registered, imported = json.loads(done.stdout)
    for module in pkgutil.walk_packages(shoal.kernels.__path__, "shoal.kernels."):
        if not module.name.endswith("triton_kernels"):
            importlib.import_module(module.name)
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("shoal::")}
    assert len(ours) > 15 and ours <= set(registered)
    assert not {"scipy", "sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor"} & set(imported)
    with_kernels = ("codecs.table_codes", "kernels.norm.norm_act", "kernels.invertible_norm.inverted_op")
    assert {f"shoal.{name}" for name in with_kernels} <= set(imported)
    assert not [name for name in imported if name.startswith("shoal.") and name.endswith("triton_kernels")]


def test_a_name_that_is_imported_late_is_the_one_of_its_module_and_is_listed() -> None:
    assert shoal.compile is importlib.import_module("shoal.engine.api").compile
    assert set(shoal.__all__) <= set(dir(shoal))


@pytest.mark.parametrize("name", shoal.__all__)
def test_no_public_function_hides_a_module_of_its_name(name: str) -> None:
    spec = importlib.util.find_spec(f"shoal.{name}")
    assert spec is None or isinstance(getattr(shoal, name), ModuleType)
