"""Which implementation of an op runs: one table, one function that chooses, one environment variable.

An op has a reference, PyTorch's own ops, which runs anywhere, and implementations that run faster where they apply.
`choose` takes the first that applies and pays. SHOAL_KERNELS restricts the choice, by words separated by commas:

| word | |
|---|---|
| `reference` | only the references; cannot be combined |
| `native`, `triton` | in addition to the references, only the kernels of the C++ library, only those in Triton, or both
| | `portable`, `avx2`, `avx512` | the instruction set of native kernels; unset: the best that this machine runs |
| `no-winograd` | native 3 x 3 convolutions as direct convolutions, not by Winograd's F(2x2, 3x3) |

Unset or empty, it restricts nothing. It is read at every choice, so that a process may change it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeVar, get_args

from shoal.errors import InputError, brief
from shoal.lowlevel.native import LEVELS, levels, library

VARIABLE = "SHOAL_KERNELS"
Kind = Literal["triton", "native"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REFERENCE, NO_WINOGRAD = "reference", "no-winograd"
_WORDS = (REFERENCE, *KINDS, *LEVELS, NO_WINOGRAD)

Functions = TypeVar("Functions")


def _always(*case: Any) -> bool:
    return True


@dataclass(frozen=True)
class Implementation(Generic[Functions]):
    """One way to run an op.

    Attributes:
        kind: "triton" or "native".
        functions: what runs: a module or an object with the functions of the op's reference.
        applies: whether it can run a case, given what `choose` is given: its device, dtypes, layouts and sizes.
        pays: whether it is then faster than what comes after it.
    """

    kind: Kind
    functions: Functions
    applies: Callable[..., bool]
    pays: Callable[..., bool] = _always


@dataclass(frozen=True)
class DispatchedOp(Generic[Functions]):
    """An entry of `TABLE`: the op's reference and its implementations, in the order they are asked."""

    name: str
    reference: Functions
    implementations: tuple[Implementation[Functions], ...]

    def functions(self, kind: str) -> Functions:
        """The functions of one implementation, for tests and benchmarks: "reference", "native" or "triton"."""
        if kind == REFERENCE:
            return self.reference
        return next(each.functions for each in self.implementations if each.kind == kind)


TABLE: dict[str, DispatchedOp[Any]] = {}


def register(name: str, reference: Functions, *implementations: Implementation[Functions]) -> DispatchedOp[Functions]:
    """Enter an op into `TABLE`.

    Args:
        name: unlike all others.
        reference: has the functions that implementations have; None where the caller has PyTorch's own ops in place.
        implementations: in the order they are asked.
    """
    assert name not in TABLE, name
    TABLE[name] = DispatchedOp(name, reference, implementations)
    return TABLE[name]


def choose(op: DispatchedOp[Functions], *case: Any) -> Functions:
    """The functions of the first implementation that SHOAL_KERNELS lets run, that applies and that pays.

    Args:
        op: as registered.
        case: what its implementations ask about, mostly the tensors that are read and written.

    Raises:
        InputError: SHOAL_KERNELS is none of its values, or a variable that it replaces is set.

    >>> op = DispatchedOp("add", "reference", (Implementation("native", "native", lambda elems: elems > 8),))
    >>> choose(op, 4), choose(op, 16)
    ('reference', 'native')
    """
    kinds = allowed().kinds
    for each in op.implementations:
        if each.kind in kinds and each.applies(*case) and each.pays(*case):
            return each.functions
    return op.reference


@dataclass(frozen=True)
class Allowed:
    """What a value of SHOAL_KERNELS lets run.

    Attributes:
        kinds: of implementations that may run in addition to the references.
        level: the instruction set of native kernels; None: the best.
        winograd: whether 3 x 3 convolutions may use Winograd's algorithm.
    """

    kinds: tuple[Kind, ...] = KINDS
    level: str | None = None
    winograd: bool = True

    def words(self) -> list[str]:
        """The value that says the same, by its words: what a measurement depends on.

        >>> parse("avx2, native").words(), parse("").words()
        (['native', 'avx2'], ['triton', 'native'])
        """
        kinds = self.kinds or (REFERENCE,)
        return [*kinds, *([self.level] if self.level else []), *([] if self.winograd else [NO_WINOGRAD])]


def allowed() -> Allowed:
    """What SHOAL_KERNELS lets run now.

    Raises:
        InputError: it is none of its values.
    """
    return parse(os.environ.get(VARIABLE, ""))


def available_kinds(device_type: str) -> tuple[Kind, ...]:
    """The kinds of implementations that SHOAL_KERNELS lets run on a device, and that this installation has.

    >>> available_kinds("meta")
    ()
    """
    if device_type == "cuda":
        from torch.utils._triton import has_triton  # seconds, where Triton is installed

        here: Kind | None = "triton" if has_triton() else None
    else:
        here = "native" if device_type == "cpu" and library() is not None else None
    return tuple(kind for kind in allowed().kinds if kind == here)


@cache
def parse(text: str) -> Allowed:
    """Read a value of SHOAL_KERNELS.

    Raises:
        InputError: it holds another word, or words that contradict each other.

    >>> parse("native,avx2")
    Allowed(kinds=('native',), level='avx2', winograd=True)
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    kinds = tuple(kind for kind in KINDS if kind in words)
    asked = [level for level in LEVELS if level in words]
    problem = ""
    if unknown := [word for word in words if word not in _WORDS]:
        problem = f"{brief(unknown[0])} is none of them"
    elif REFERENCE in words and len(set(words)) > 1:
        problem = "reference excludes other words"
    elif len(asked) > 1:
        problem = f"{asked[0]} and {asked[1]} exclude each other"
    elif kinds == ("triton",) and len(words) > 1:
        problem = "an instruction set and no-winograd are for native kernels, so add native"
    if problem:
        raise InputError(
            f"{VARIABLE}={text}: expected words of {', '.join(_WORDS)}, separated by commas; {problem}; "
            "unset it for the fastest that applies"
        )
    if REFERENCE not in words and not kinds:
        kinds = KINDS
    return Allowed(kinds, asked[0] if asked else None, NO_WINOGRAD not in words)


def level_number(level: str | None = None) -> int:
    """The number of an instruction set in `csrc/shoal_native.h`; -1 is the best that the machine runs.

    Args:
        level: "portable", "avx2" or "avx512"; None: what SHOAL_KERNELS says.

    Raises:
        InputError: this machine does not run it.
    """
    asked = allowed().level if level is None else level
    if asked is None:
        return -1
    if asked not in levels():
        here = ", ".join(levels()) or "no native kernels"
        raise InputError(f"instruction set {asked}: this machine runs {here}; choose one of those or leave it out")
    return LEVELS.index(asked)
