"""One exception tree, split by who must act."""

from __future__ import annotations

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
    """Everything Shoal raises on purpose."""


class InputError(ShoalError, ValueError):
    """An argument, a file or a data set is not what was asked for: the caller mends it."""


class BudgetError(ShoalError):
    """No plan fits the budget: the caller gives more bytes, a smaller batch or another model.

    Attributes:
        budget_bytes: what was asked for.
        least_feasible_bytes: the smallest budget for which a plan was found: that budget works. None where none was
            looked for.
        op, layer: the op at the peak of that least plan and the layer it belongs to.
        largest: the largest storages alive at that op, as (name, layer, bytes).
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int = 0,
        least_feasible_bytes: int | None = None,
        op: str = "",
        layer: str = "",
        largest: tuple[tuple[str, str, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_feasible_bytes = least_feasible_bytes
        self.op = op
        self.layer = layer
        self.largest = largest

    def with_hint(self, hint: str) -> BudgetError:
        """The same error with one more thing that would help."""
        return BudgetError(
            f"{self}; {hint}",
            budget_bytes=self.budget_bytes,
            least_feasible_bytes=self.least_feasible_bytes,
            op=self.op,
            layer=self.layer,
            largest=self.largest,
        )


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

    def __init__(self, message: str = "", *, silent_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.silent_ranks = silent_ranks
