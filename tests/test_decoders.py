"""Files of others are read by named decoders, and no reader runs code that a file holds."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("src", "bench", "docs", "examples") for path in (ROOT / folder).rglob("*.py"))
# A call that reads a file, and the keyword that says what it may make of it.
READERS = {
    "Image.open": "formats",
    "torch.load": "weights_only",
    "np.load": "allow_pickle",
    "tarfile.open": "mode",
}
NEVER = ("pickle.load", "pickle.loads", "marshal.load", "marshal.loads", "shelve.open", "yaml.load", "joblib.load")


@cache
def calls() -> list[tuple[Path, str, set[str], int]]:
    """Of each call by a name: its file, what is called, its keywords, and its line."""
    return [
        (path, ast.unparse(node.func), {keyword.arg or "" for keyword in node.keywords}, node.lineno)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))
    ]


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_says_what_it_may_make_of_a_file(reader: str) -> None:
    found = [call for call in calls() if call[1] == reader]
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path, _, keywords, line in found if READERS[reader] not in keywords]
    assert found and not wrong


def test_nothing_is_unpickled_by_pickle_itself() -> None:
    assert not [f"{path.relative_to(ROOT)}:{line}: {name}" for path, name, _, line in calls() if name in NEVER]
