"""Errors say what happened and what to type in one line of at most 160 characters; details stand below it."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.core.over_budget import over_budget
from shoal.core.sizes import budget_text, parse_bytes
from shoal.errors import MESSAGE_CHARACTERS, BudgetError, InputError, ShoalError, TransferError

ROOT = Path(shoal.__file__).parent
VALUE_CHARACTERS = 12  # for a placeholder in a message: a name, a size, a shape
BASES = ("ShoalError", "InputError", "BudgetError", "CaptureError", "PlanError", "CodecError", "TransferError")


def characters(node: ast.expr) -> int:
    """Of a message, with values of a usual length."""
    if isinstance(node, ast.JoinedStr):
        return sum(map(characters, node.values))
    if isinstance(node, ast.BinOp):
        return characters(node.left) + characters(node.right)
    return len(str(node.value)) if isinstance(node, ast.Constant) else VALUE_CHARACTERS


def messages() -> Iterator[tuple[str, ast.expr]]:
    """Where each error of ours is made, and its message."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BASES and node.args:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[0]


@pytest.mark.slow
def test_every_message_is_short() -> None:
    found = dict(messages())
    assert len(found) > 300
    long = {place: length for place, node in found.items() if (length := characters(node)) > MESSAGE_CHARACTERS}
    assert not long


@pytest.mark.parametrize("path", ["/data", "/a" * 90, "x" * 400])
def test_a_long_value_goes_below_the_message(path: str) -> None:
    error = InputError(f"cannot write {path}: no space left on device; give a writable folder with free space")
    assert str(error).splitlines()[0] == error.message and len(error.message) <= MESSAGE_CHARACTERS
    assert re.sub("[; \n]", "", str(error)) == re.sub("[; \n]", "", error.args[0])


def test_every_detail_has_a_line_and_errors_can_be_copied() -> None:
    error = TransferError("rank 1 is silent; see its log", details={"waited": "3 s"}, silent_ranks=(1,))
    error = error.with_detail("bytes", 10)
    for one in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(one).splitlines() == ["rank 1 is silent; see its log", "  waited: 3 s", "  bytes: 10"]
        assert one.silent_ranks == (1,) and isinstance(one, ShoalError)


@pytest.mark.parametrize("needed_bytes", [700, 1024, 1_500_000, 218_412_345, 1_287_651_328, 2**40 + 1])
def test_a_budget_error_says_what_to_type_and_that_is_enough(needed_bytes: int) -> None:
    error = over_budget("ResNet", needed_bytes, 600, op="conv", persistent_bytes=5)
    typed = error.message.partition("budget='")[2].partition("'")[0]
    assert typed == budget_text(needed_bytes)
    assert needed_bytes <= parse_bytes(typed) <= 1.1 * needed_bytes
    assert (error.least_feasible_bytes, error.budget_bytes, error.op, error.persistent_bytes) == (
        needed_bytes,
        600,
        "conv",
        5,
    )
    assert str(needed_bytes) in error.details["minimum"]
    more = over_budget("image and text", needed_bytes, 600, is_minimum=False)
    assert isinstance(more, BudgetError) and more.least_feasible_bytes is None
