"""Whether a change of PyTorch's own code, which stays for the whole process, has an effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Asked:
    """True within the blocks that ask, in the context that runs them: other threads do not see it.

    Args:
        name: of what is asked for.

    >>> asked = Asked("releasing arguments")
    >>> with asked.within():
    ...     print(bool(asked))
    True
    >>> bool(asked)
    False
    """

    def __init__(self, name: str) -> None:
        self._now: ContextVar[bool] = ContextVar(name, default=False)

    def __bool__(self) -> bool:
        return self._now.get()

    @contextmanager
    def within(self) -> Iterator[None]:
        """A block that asks."""
        before = self._now.set(True)
        try:
            yield
        finally:
            self._now.reset(before)
