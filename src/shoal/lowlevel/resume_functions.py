"""Dynamo's resume functions, which run what follows a graph break: made to release what they are given, and in loops.

Each resume function calls the next one, and CPython keeps the arguments of a call until it returns: at the end of a
forward pass one tensor is alive for each graph break before it. Within `releasing_arguments` the values are passed in a
list, which the function empties; of itself 2.13 does so for a function that deletes a variable.

Where a graph breaks in a loop, Dynamo makes none and leaves the whole function out of all graphs. The resume function
of a loop over a few layers is called with those that are left, and may break again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dis import opmap
from functools import cache
from math import prod
from types import CodeType
from typing import Any

from torch import nn
from torch._dynamo.bytecode_analysis import JUMP_OPNAMES
from torch._dynamo.bytecode_transformation import (
    Instruction,
    create_binary_subscr,
    create_instruction,
    create_load_const,
    overwrite_instruction,
    transform_code_object,
)
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.lists import ListIteratorVariable, RangeIteratorVariable, TupleIteratorVariable

from shoal.lowlevel.asked import Asked

_resume: Any = ContinueExecutionCache
_VALUES = "__shoal_frame_values"  # the argument that is the list
_asked = Asked("releasing_arguments")
_ITERATORS = (ListIteratorVariable, TupleIteratorVariable, RangeIteratorVariable)  # what a resume function can be given
_MOST_ITERATIONS = 32  # each that breaks is a capture of the same function, and Dynamo takes 64 of one


@contextmanager
def releasing_arguments() -> Iterator[None]:
    """While the block runs, Dynamo makes resume functions that release each argument after its last use."""
    _let_dynamo_release()
    with _asked.within():
        yield


@cache
def _let_dynamo_release() -> None:
    """From here on, in this process; without effect outside of `releasing_arguments`."""
    translator: Any = InstructionTranslatorBase
    translator.codegen_call_resume = staticmethod(_passing_a_list(translator.codegen_call_resume))
    _resume.generate = staticmethod(_taking_a_list(_resume.generate))


def _taking_a_list(generate: Callable[..., CodeType]) -> Callable[..., CodeType]:
    def generated(of: CodeType, *args: Any) -> CodeType:
        code = generate(of, *args)
        if of in _resume.generated_code_metadata:  # then `generate` has called this with the function that it is of
            return code
        *_, inner, _pops_result = args  # the resume functions of the calls within, of which it calls the last
        given = code.co_varnames[2 : code.co_argcount]  # in a list already: by 2.13, where a variable is deleted
        asked = _asked and given not in ((), ("__resume_frame_values",))
        passes = bool(inner) and _takes_a_list(inner[-1])
        if not asked and not passes:
            return code

        def change(instructions: list[Instruction], options: dict[str, Any]) -> None:
            if passes:
                _as_one_argument(instructions)
            if asked:
                _take_from_list(instructions, options)

        changed, _ = transform_code_object(code, change)
        _resume.generated_code_metadata[changed] = _resume.generated_code_metadata[code]
        return changed

    return generated


def _passing_a_list(call: Callable[..., None]) -> Callable[..., None]:
    def called(codes: list[CodeType], names: list[str], codegen: Any) -> None:
        call(codes, names, codegen)
        if _takes_a_list(codes[-1]):
            _as_one_argument(reversed(codegen.get_instructions()))

    return called


def _takes_a_list(code: CodeType) -> bool:
    return code.co_varnames[2:3] == (_VALUES,)


def _as_one_argument(instructions: Iterable[Instruction]) -> None:
    """The first list of values that a list of arguments is extended by is appended instead."""
    extend = next(one for one in instructions if one.opname == "LIST_EXTEND")
    extend.opname, extend.opcode = "LIST_APPEND", opmap["LIST_APPEND"]


def _take_from_list(instructions: list[Instruction], options: dict[str, Any]) -> None:
    """Change the bytecode of a resume function: what it is given is in a list, which it empties."""
    names, count = options["co_varnames"], options["co_argcount"]
    on_stack = [name for name in names[2:count] if name.startswith("___stack")]
    for one in [one for one in instructions if one.opname == "LOAD_FAST" and one.argval in on_stack]:
        place = instructions.index(one)
        instructions[place : place + 1] = overwrite_instruction(one, _taken(on_stack.index(one.argval)))
    options["co_argcount"] = 3
    options["co_varnames"] = (*names[:2], _VALUES, *names[2 + len(on_stack) :])
    begins = 1 + next(place for place, one in enumerate(instructions) if one.opname == "STORE_FAST")
    instructions[begins:begins] = [
        one
        for place, name in enumerate(names[2 + len(on_stack) : count], len(on_stack))
        for one in (*_taken(place), create_instruction("STORE_FAST", argval=name))
    ]


def _taken(place: int) -> list[Instruction]:
    """Loads a value of the list, which has None there from then on."""
    value = [create_instruction("LOAD_FAST", argval=_VALUES), create_load_const(place)]
    cleared = [create_load_const(None), *deepcopy(value), create_instruction("STORE_SUBSCR")]
    return [*value, create_binary_subscr(), *cleared]


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
