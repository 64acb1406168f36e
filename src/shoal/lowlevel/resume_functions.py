"""Dynamo's resume functions, which run what follows a graph break: made to release what they are given.

Each resume function calls the next one, and CPython keeps the arguments of a call until it returns: at the end of a
forward pass one tensor is alive for each graph break before it. Dynamo passes the values in a list instead and empties
that, but only if the function deletes a variable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch._dynamo import resume_execution
from torch._dynamo.bytecode_transformation import Instruction, create_instruction

_resume: Any = resume_execution
_STACK = "___stack0"  # what Dynamo calls the result of the call that broke the graph


@contextmanager
def releasing_arguments() -> Iterator[None]:
    """While the block runs, Dynamo makes resume functions that release each argument after its last use.

    What else calls Dynamo meanwhile, as another thread, gets such functions too; they compute the same.
    """
    original = _resume.transform_code_object
    if not hasattr(_resume.ContinueExecutionCache, "uses_boxed_call"):  # 2.12
        yield
        return

    def transform(code: CodeType, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(code, _as_if_deleting(code, change), *args, **kwargs)

    _resume.transform_code_object = transform
    try:
        yield
    finally:
        _resume.transform_code_object = original


def _as_if_deleting(code: CodeType, change: Callable[..., Any]) -> Callable[..., Any]:
    """A change of bytecode, which sees instructions that delete each variable; they are not in the result."""

    def changed(instructions: list[Instruction], options: dict[str, Any]) -> Any:
        added = [create_instruction("DELETE_FAST", argval=name) for name in (_STACK, *code.co_varnames)]
        for one in added:
            one.offset = sys.maxsize  # after the graph break, wherever that is
        instructions[:0] = added  # in front: Dynamo compares the ends of a function and of its resume functions
        result = change(instructions, options)
        ours = set(map(id, added))
        instructions[:] = [one for one in instructions if id(one) not in ours]
        return result

    return changed
