"""Every example of a docstring prints what it says, in the package, benches and examples, and none is left out."""

from __future__ import annotations

import ast
import doctest
import gc
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import bench
import examples
import shoal
from tests.offload.links.slabs import forget_threads, our_threads

ROOTS = {package.__name__: Path(str(package.__file__)).parent for package in (shoal, bench, examples)}
FILES = {
    ".".join((name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
    for name, root in ROOTS.items()
    for path in sorted(root.rglob("*.py"))
}
# It takes seconds, and what it prints is this machine's.
SKIPPED = ['[link.name for link in measure_links("cpu")]']
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def docstrings(path: Path) -> list[doctest.DocTest]:
    """The examples of each docstring in a file: doctest's own search misses those of a `cached_property`."""
    return list(_docstrings(path))


def _docstrings(path: Path) -> Iterator[doctest.DocTest]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            name, line = getattr(node, "name", path.stem), node.body[0].lineno - 1
            yield doctest.DocTestParser().get_doctest(text, {}, name, str(path), line)


WRITTEN = {name: len(re.findall(r"^\s*>>> ", path.read_text(), re.MULTILINE)) for name, path in FILES.items()}


def is_here(name: str) -> bool:
    """Whether what a module of `shoal.hosts` is called after is installed; so is what all others import."""
    if not name.startswith("shoal.hosts."):
        return True
    host = {"nnunet": "nnunetv2"}.get(name.split(".")[2], name.split(".")[2])
    return importlib.util.find_spec(host) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, written in WRITTEN.items() if written])
def test_the_examples_of_a_module_print_what_they_say(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name.endswith("_triton_kernels"):
        pytest.importorskip("triton", reason="Triton is not installed")
    if not is_here(name):
        pytest.skip("its host is not installed: make test-hosts")
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.delenv("SHOAL_ALLOW", raising=False)  # what users get
    forget_threads()
    module = importlib.import_module(name)
    for tried in docstrings(FILES[name]):
        tried.globs = dict(vars(module))
        assert doctest.DocTestRunner().run(tried).failed == 0
    if our_threads():
        gc.collect()
    assert our_threads() == []  # an example shows how to close what it opened


@pytest.mark.parametrize("root", ROOTS)
def test_every_module_can_be_imported(root: str) -> None:
    kernels = importlib.util.find_spec("triton") is not None
    for name in FILES:
        if name.split(".")[0] == root and (kernels or not name.endswith("_triton_kernels")) and is_here(name):
            importlib.import_module(name)


def test_no_example_is_left_out() -> None:
    for name, written in WRITTEN.items():
        assert sum(len(each.examples) for each in docstrings(FILES[name]) if written) == written, name
    assert sum(WRITTEN.values()) > 300
