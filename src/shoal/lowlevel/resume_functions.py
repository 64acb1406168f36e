"""Dynamo's resume functions, which run what follows a graph break: made to release what they are given, and in loops.

Each resume function calls the next one, and CPython keeps the arguments of a call until it returns: at the end of a
forward pass one tensor is alive for each graph break before it. Dynamo passes the values in a list instead and empties
that, but only if the function deletes a variable.

Where a graph breaks in a loop, Dynamo makes none and leaves the whole function out of all graphs. The resume function
of a loop over a few layers is called with those that are left, and may break again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from types import CodeType
from typing import Any

from torch import nn
from torch._dynamo import resume_execution
from torch._dynamo.bytecode_analysis import JUMP_OPNAMES
from torch._dynamo.bytecode_transformation import Instruction, create_instruction
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.lists import ListIteratorVariable, RangeIteratorVariable, TupleIteratorVariable

_resume: Any = resume_execution
_STACK = "___stack0"  # what Dynamo calls the result of the call that broke the graph
_ITERATORS = (ListIteratorVariable, TupleIteratorVariable, RangeIteratorVariable)  # what a resume function can be given
_MOST_ITERATIONS = 32  # each that breaks is a capture of the same function, and Dynamo takes 64 of one


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


@contextmanager
def resuming_in_loops(may_resume: Callable[[str], bool]) -> Iterator[None]:
    """While the block runs, Dynamo goes on after a graph break in a loop over a few layers or over a small range.

    Args:
        may_resume: whether it may, by the reason of the break.
    """
    with ExitStack() as undone:
        skip = InstructionTranslatorBase.__dict__["raise_loop_graph_break"]
        undone.callback(setattr, InstructionTranslatorBase, "raise_loop_graph_break", skip)

        def skip_unless(translator: Any, code: CodeType, reason: Exception) -> None:
            if not (may_resume(str(reason)) and _are_few_left(translator)):
                skip.__func__(code, reason)

        InstructionTranslatorBase.raise_loop_graph_break = skip_unless  # type: ignore[assignment]
        for kind in (nn.ModuleList, nn.Sequential):  # a resume function can be given a tuple's iterator, no dict's
            undone.callback(setattr, kind, "__iter__", kind.__iter__)
            kind.__iter__ = _over_tuple  # type: ignore[method-assign]
        yield


def _over_tuple(layers: nn.Module) -> Iterator[nn.Module]:
    return iter(tuple(layers._modules.values()))  # type: ignore[arg-type]


def _are_few_left(translator: Any) -> bool:
    """Whether all loops around the instruction that is translated are over something of which little is left."""
    iterations = 1
    while translator is not None:
        after, offset = translator.instructions[translator.instruction_pointer :], translator.current_instruction.offset
        jumps = (one.target for one in after if one.opname in JUMP_OPNAMES)
        loops = {target.offset: target.opname for target in jumps if target is not None and target.offset < offset}
        left = [_left(value) for value in translator.stack if isinstance(value, _ITERATORS)]
        if len(left) != len(loops) or any(name != "FOR_ITER" for name in loops.values()):
            return False  # it loops while a condition holds, or over something else
        iterations *= prod(count + 1 for count in left)
        translator = translator.parent
    return iterations <= _MOST_ITERATIONS


def _left(iterator: Any) -> int:
    remaining: int = (
        iterator.len if isinstance(iterator, RangeIteratorVariable) else len(iterator.items) - iterator.index
    )
    return remaining
