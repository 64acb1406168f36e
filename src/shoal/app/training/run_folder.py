"""The folder of a run: one run at a time writes there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.app.training.results import check_writable
from shoal.core.files import remove_partials, try_lock
from shoal.errors import InputError

log = logging.getLogger("shoal")
_held: set[int] = set()


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make `folder`, and keep every other run out of it until this block ends, or this process, however it ends.

    The folder itself is locked: nothing is left over that a later run would have to remove. What an earlier run that
    was killed left half written is removed. Of several ranks, the one that writes calls it.

    Raises:
        InputError: the folder cannot be made or written, or another run writes there.
    """
    check_writable(folder)
    handle = os.open(folder, os.O_RDONLY)
    _held.add(handle)
    try:
        try:
            free = try_lock(handle)
        except OSError as error:
            log.warning("%s cannot be locked (%s): see that no other run writes there", folder, error.strerror)
            free = True
        if not free:
            raise InputError(f"another run is writing to {folder}; wait for it to end, or give another --out")
        remove_partials(folder)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def _let_go_in_a_child() -> None:
    """A loader's worker that outlives a killed run must not keep its folder locked."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_a_child)
