"""Folders read as a pipeline: each imports only what lies below it, no two modules import each other in a circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
# From the bottom up: a folder imports from those before it. Folders of one line do not import each other.
FLOORS = (
    ("errors",),
    ("core",),
    ("planners", "lowlevel"),
    ("codecs", "memory", "offload"),
    ("kernels",),
    ("transforms",),
    ("capture", "report"),
    ("cost",),
    ("engine", "distributed"),
    ("shoal",),
    ("app",),
    ("__main__",),
)
FOLDERS = tuple(folder for floor in FLOORS for folder in floor)
# A plan can be drawn, by what is imported when it is.
LATE = {("shoal.core.plan", "shoal.report")}


def name_of(path: Path) -> str:
    return ".".join(("shoal", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of Shoal that this one imports, at its head or later; a package's names count as the package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(full & MODULES.keys() or {node.module})
    return frozenset(name for name in found & MODULES.keys() - {module} if (module, name) not in LATE)


def folder_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "shoal"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    floor = next(place for place, folders in enumerate(FLOORS) if folder in folders)
    below = {folder}.union(*FLOORS[:floor])
    wrong = [
        f"{module} imports {imported}"
        for module in MODULES
        if folder_of(module) == folder
        for imported in sorted(imports_of(module))
        if folder_of(imported) not in below
    ]
    assert not wrong


def test_every_folder_has_its_floor() -> None:
    assert {folder_of(module) for module in MODULES} == {folder for floor in FLOORS for folder in floor}


def test_nothing_is_imported_in_a_circle() -> None:
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    graph = {module: imports_of(module) - packages for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_at_most_five_files_lie_flat() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 5


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()} - {ROOT}))
def test_every_folder_says_what_lives_there_and_what_it_imports(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text is not None and "Imports " in text
    if "Imports all" in text or "Imports everything" in text:
        return
    listed = set(re.findall(r"`([a-z_.]+)`", text.partition("Imports ")[2]))
    package = name_of(folder / "__init__.py").removeprefix("shoal.")
    inside = {module for module, path in MODULES.items() if path.parent == folder and path.name != "__init__.py"}
    used = {folder_of(imported) for module in inside for imported in imports_of(module)} - {"errors"}
    assert used <= {name.partition(".")[0] for name in listed} | {package.partition(".")[0]}
