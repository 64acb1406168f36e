"""Links of the documentation lead somewhere, and name what exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LINKS = [
    pytest.param(page, text, target, id=f"{page.stem}-{text}-{target}")
    for page in PAGES
    for text, target in re.findall(r"\[([^\]]+)\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    if not target.startswith(("http:", "https:"))
]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes, methods as Class.method, and constants of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
    methods = {name.partition(".")[2] for name in found if "." in name}
    return frozenset(found | methods | {path.stem})


@pytest.mark.parametrize(("page", "text", "target"), LINKS)
def test_a_link_leads_to_what_it_names(page: Path, text: str, target: str) -> None:
    there = (page.parent / target).resolve()
    assert there.exists(), f"{page.name} links to {target}"
    if there.suffix == ".py" and re.fullmatch(r"`[\w.]+`", text) and "/" not in text and not text.endswith(".py`"):
        assert text.strip("`") in names_in(there), f"{target} has no {text}"
