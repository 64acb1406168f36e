"""Where Shoal keeps what is costly to make again: decoded data sets, measured op times."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shoal.errors import InputError

VARIABLE = "SHOAL_CACHE"


def cache_dir() -> Path:
    """The folder named by SHOAL_CACHE, else `~/.cache/shoal`; made if it does not exist.

    Raises:
        InputError: it cannot be made or written to.
    """
    named = os.environ.get(VARIABLE)
    try:
        folder = Path(named).expanduser() if named else Path.home() / ".cache" / "shoal"
        folder.mkdir(parents=True, exist_ok=True)
        # A permission bit says little about a read-only mount or a full quota; a file says all.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        place = f"{VARIABLE}={named}" if named else "~/.cache/shoal"
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write the cache {place}: {reason}; set {VARIABLE} to a writable folder") from error
    return folder
