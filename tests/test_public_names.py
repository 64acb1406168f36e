"""What a program finds in `shoal` itself."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

import shoal
from shoal import errors
from shoal.core.plan import Plan


def test_every_public_name_is_there() -> None:
    assert shoal.__all__ == sorted(set(shoal.__all__))
    assert all(hasattr(shoal, name) for name in shoal.__all__)


@pytest.mark.parametrize("name", [name for name, kind in vars(errors).items() if isinstance(kind, type)])
def test_every_exception_can_be_caught_by_its_public_name(name: str) -> None:
    assert name in shoal.__all__ and getattr(shoal, name) is getattr(errors, name)


def test_a_plan_can_be_loaded_by_its_public_name() -> None:
    assert "Plan" in shoal.__all__ and shoal.Plan is Plan


def test_there_are_thirteen_names_beside_the_exceptions() -> None:
    names = {name for name in shoal.__all__ if not name.endswith("Error")}
    assert names == {
        "Budget",
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
    }


@pytest.mark.parametrize("name", ["invert_batchnorm", "lossy_report", "restore_batchnorm", "models", "data"])
def test_former_names_work_for_one_release_and_say_what_replaces_them(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"shoal.{name} is now "):
        assert getattr(shoal, name) is not None


@pytest.mark.parametrize("name", shoal.__all__)
def test_no_public_function_hides_a_module_of_its_name(name: str) -> None:
    spec = importlib.util.find_spec(f"shoal.{name}")
    assert spec is None or isinstance(getattr(shoal, name), ModuleType)
