"""No Triton kernel of the package is left out of what compiles for GPUs that are not here."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.interpreter import not_interpreted, with_triton
from tests.kernels_elsewhere import kernels_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shoal"


def is_kernel(node: ast.AST) -> bool:
    """A function under `triton.jit`, by whatever other decorators."""
    return isinstance(node, ast.FunctionDef) and any("triton." in ast.unparse(one) for one in node.decorator_list)


def modules_of_kernels() -> dict[str, dict[str, ast.FunctionDef]]:
    """Module → its kernels, helpers included, by name."""
    found: dict[str, dict[str, ast.FunctionDef]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "triton" not in (content := path.read_text()):
            continue
        named = ".".join(("shoal", *path.relative_to(PACKAGE).with_suffix("").parts))
        kernels = {node.name: node for node in ast.walk(ast.parse(content)) if is_kernel(node)}  # type: ignore[attr-defined]
        if kernels:
            found[named] = kernels  # type: ignore[assignment]
    return found


@cache
def compiling_tests() -> list[str]:
    """Sources of the tests that hold what was compiled against all kernels of a module."""
    contents = [path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    found = (node for content in contents if "@each_capability" in content for node in ast.walk(ast.parse(content)))
    return [
        ast.unparse(node)
        for node in found
        if isinstance(node, ast.FunctionDef) and "each_capability" in map(ast.unparse, node.decorator_list)
    ]


MODULES = modules_of_kernels()


def test_there_are_kernels_to_look_for() -> None:
    assert len(MODULES) >= 3


@pytest.mark.parametrize("module", MODULES)
def test_each_module_of_kernels_has_a_test_that_compiles_all_of_them(module: str) -> None:
    asked = f"assert found.keys() == kernels_of({module.rpartition('.')[2]})"
    assert any(asked in source for source in compiling_tests()), f"no test of each_capability has `{asked}`"


@with_triton
@not_interpreted
@pytest.mark.parametrize("module", MODULES)
def test_a_kernel_that_is_not_compiled_by_itself_is_part_of_one_that_is(module: str) -> None:
    kernels = MODULES[module]
    launched = kernels_of(import_module(module))
    reached, pending = set(launched), list(launched)
    while pending:
        calls = [node.func for node in ast.walk(kernels[pending.pop()]) if isinstance(node, ast.Call)]
        called = {call.id for call in calls if isinstance(call, ast.Name)} & kernels.keys()
        pending += called - reached
        reached |= called
    assert reached == kernels.keys()
