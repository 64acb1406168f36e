"""One exception tree, split by who must act."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Self

MESSAGE_CHARACTERS = 160  # two lines of a terminal
_BRIEF_CHARACTERS = 60


def brief(value: object) -> str:
    """`repr(value)` for an error: in one line, and cut where it is long.

    >>> brief("a\\nb"), brief([10**400])
    ("'a\\\\nb'", '[10000000000000000000000000000000000000000000000000000000000... (403 characters)')
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more than 4300 digits has no repr, and a caller's object may have a broken one
        return f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= _BRIEF_CHARACTERS else f"{text[:_BRIEF_CHARACTERS]}... ({len(text)} characters)"


class ShoalError(Exception):
    """Base class of the errors that Shoal raises on purpose.

    Attributes:
        message: what happened and what to type, in at most 160 characters.
        details: further facts by their labels. `str(error)` has the message, and below it one fact a line.

    >>> print(ShoalError("the link is closed; open another", details={"sent": "10 B"}))
    the link is closed; open another
      sent: 10 B
    """

    def __init__(self, message: str = "", *, details: Mapping[str, object] | None = None) -> None:
        # BaseException.__new__ has set `args`; Dynamo cannot trace a call of its __init__ in a model that raises.
        self.message, *self._more = _lines(message)
        self.details = dict(details or {})

    def __str__(self) -> str:
        facts = [*self._more, *(f"{label}: {value}" for label, value in self.details.items())]
        return "\n  ".join([self.message, *facts])

    def with_detail(self, label: str, value: object) -> Self:
        """The same error with one more fact."""
        more = copy.copy(self)
        more.details = {**self.details, label: value}
        return more


def _lines(message: str) -> list[str]:
    """The lines of a message, the first one broken between clauses if it is too long, as with a long path in it.

    >>> [len(line) for line in _lines(f"cannot write {'x' * 110}: no space left on device; give a writable folder")]
    [149, 22]
    """
    first, *more = message.splitlines() or [""]
    if len(first) > MESSAGE_CHARACTERS:
        found = {mark: first.rfind(mark, 0, MESSAGE_CHARACTERS) + 1 for mark in ("; ", ", ", ": ", " ")}
        end = found["; "] or max(found[", "], found[": "]) or found[" "] or MESSAGE_CHARACTERS
        first, more = first[:end].rstrip(), [first[end:].strip(), *more]
    return [first, *more]


class InputError(ShoalError, ValueError):
    """An argument, a file or a data set is not what was asked for: the caller corrects it."""


class BudgetError(ShoalError):
    """No plan fits the budget: use more bytes, a smaller batch or another model.

    Attributes:
        budget_bytes: what was asked for.
        least_feasible_bytes: the smallest budget for which a plan was found: that budget works. None if none was
            searched for.
        persistent_bytes: of it, parameters, buffers, gradients, optimizer state and inputs: in use whatever the plan.
            None if not known.
        op, phase, layer: the op at the peak of the plan with the minimum, its pass and the layer it belongs to.
        workspace_bytes: scratch memory of that op.
        largest: the largest storages alive at that op, as (name, layer, bytes), the dominant one first.
        stopped_early: parts of the search for a plan that a time limit ended. Searched again, less may be enough.
    """

    def __init__(
        self,
        message: str,
        *,
        details: Mapping[str, object] | None = None,
        budget_bytes: int = 0,
        least_feasible_bytes: int | None = None,
        persistent_bytes: int | None = None,
        op: str = "",
        phase: str = "",
        layer: str = "",
        workspace_bytes: int = 0,
        largest: tuple[tuple[str, str, int], ...] = (),
        stopped_early: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, details=details)
        self.budget_bytes = budget_bytes
        self.least_feasible_bytes = least_feasible_bytes
        self.persistent_bytes = persistent_bytes
        self.op = op
        self.phase = phase
        self.layer = layer
        self.workspace_bytes = workspace_bytes
        self.largest = largest
        self.stopped_early = stopped_early


class CaptureError(ShoalError):
    """The model's step could not be captured as one graph: the model's author acts (the line is named)."""


class PlanError(ShoalError):
    """A plan does not belong to this step, or breaks one of the rules of `shoal.core.validate`."""


class CodecError(ShoalError):
    """A tensor or a byte string cannot be encoded or decoded."""


class TransferError(ShoalError):
    """A transfer between device and host, or between ranks, failed.

    Attributes:
        silent_ranks: of the group, those that gave no sign of life when it failed; empty if none is known to be silent.
    """

    def __init__(
        self, message: str = "", *, details: Mapping[str, object] | None = None, silent_ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message, details=details)
        self.silent_ranks = silent_ranks
