"""Folders read as a pipeline: each imports only what lies below it, no two modules import each other in a circle."""

from __future__ import annotations

import ast
import re
import tomllib
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
    ("lowlevel",),
    ("planners",),
    ("codecs", "memory", "offload"),
    ("kernels",),
    ("transforms",),
    ("graph",),
    ("rewrites",),
    ("capture", "report"),
    ("cost",),
    ("engine", "distributed"),
    ("shoal",),
    ("app", "hosts"),
    ("__main__",),
)
FOLDERS = tuple(folder for floor in FLOORS for folder in floor)
# A plan and a frontier can be drawn, by what is imported when they are.
LATE = {
    ("shoal.core.plan", "shoal.report"),
}
# Names of torch with an underscore that any module may use, and why.
PRIVATE_NAMES = {
    "torch._check": "documented under this name",
    "torch._dynamo.mark_dynamic": "documented under this name",
    "torch._foreach_": "documented under this name",
    "torch._ops.OpOverload": "the type of an aten op has no other name",
    "torch.nn.modules.": "the layers' base classes, such as _ConvNd and _BatchNorm, have no other names",
    "torch.ops.": "names of ops",
    "torch.utils._pytree": "PyTorch has no public one",
}
# Folders whose trade is a private part of torch.
PRIVATE_TRADES = {
    "lowlevel": ("torch",),
    "capture": ("torch._dynamo", "torch._functorch", "torch.utils._sympy"),
    "graph": ("torch._functorch", "torch.utils._sympy"),
    "engine": (
        "torch._dynamo",
        "torch._guards",
        "torch._subclasses",
        "torch.fx.graph._BoxedCodeGen",
    ),
}


def name_of(path: Path) -> str:
    return ".".join(("shoal", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of Shoal that this one imports, at its head or later; a package's names count as the package."""
    found: set[str] = set()
    for node in ast.walk(parsed(module)):
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


def test_the_library_imports_nothing_of_the_project_around_it() -> None:
    outside = re.compile(r"^\s*(?:from|import) (?:bench|examples|tests)\b", re.MULTILINE)
    assert not [module for module, path in MODULES.items() if outside.search(path.read_text())]


def test_the_wheel_holds_the_library_only() -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert settings["wheel"]["packages"] == ["src/shoal"]
    assert {"bench", "examples", "tests"} <= set(settings["sdist"]["exclude"])


@pytest.mark.parametrize("script", [".ci/run", ".ci/slow", "Makefile", "pyproject.toml"])
def test_tests_that_a_script_names_exist(script: str) -> None:
    project = Path(__file__).parents[1]
    named = set(re.findall(r"(?<![\w/.-])tests/[\w/.]*\w", (project / script).read_text()))
    assert not [name for name in named if not (project / name).exists()]


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


@cache
def names_of_torch(module: str) -> frozenset[str]:
    """The full names that the module imports from torch, or reaches by attributes."""
    tree = parsed(module)
    found: set[str] = set()
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in parts:
            first, _, rest = ast.unparse(node).partition(".")
            if re.fullmatch(r"[\w.]+", rest) and first in known:
                found.add(f"{known[first]}.{rest}")
    return frozenset(name for name in found if name.startswith("torch."))


def private_names_of_torch(module: str) -> set[str]:
    """Those that have an underscore."""
    return {name for name in names_of_torch(module) if re.search(r"\._(?!_)", name)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_private_names_of_torch_stand_in_lowlevel(folder: str) -> None:
    allowed = (*PRIVATE_NAMES, *PRIVATE_TRADES.get(folder, ()))
    wrong = {
        module: names
        for module in MODULES
        if folder_of(module) == folder
        and (names := sorted(name for name in private_names_of_torch(module) if not f"{name}.".startswith(allowed)))
    }
    assert not wrong, "give it a function with a plain name in lowlevel"


def test_every_private_name_that_is_allowed_is_used() -> None:
    used = {(folder_of(module), f"{name}.") for module in MODULES for name in private_names_of_torch(module)}
    unused = [allowed for allowed in PRIVATE_NAMES if not any(name.startswith(allowed) for _, name in used)]
    unused += [
        f"{allowed} in {folder}"
        for folder, names in PRIVATE_TRADES.items()
        for allowed in names
        if not any(user == folder and name.startswith(allowed) for user, name in used)
    ]
    assert not unused


def test_only_four_files_call_what_cuda_alone_has() -> None:
    """All else asks `torch.accelerator`, `torch.Stream` and `torch.Event`, which other devices have too."""
    calling = {
        module for module in MODULES if any(f"{name}.".startswith("torch.cuda.") for name in names_of_torch(module))
    }
    assert calling == {
        f"shoal.lowlevel.{name}" for name in ("cuda_allocator", "cuda_calls", "cuda_graphs", "torch_versions")
    }


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}
