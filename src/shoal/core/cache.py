"""The cache folder: decoded data sets, measured op times, compiled extensions."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from shoal.errors import InputError

VARIABLE = "SHOAL_CACHE"


def cache_dir() -> Path:
    """The folder named by SHOAL_CACHE, else `~/.cache/shoal` if it exists, else the platform's; created if missing.

    Raises:
        InputError: it cannot be created or written to.
    """
    named = os.environ.get(VARIABLE)
    try:
        folder = Path(named).expanduser() if named else _default()
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits do not show a read-only mount or a full quota; creating a file does.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        place = f"{VARIABLE}={named}" if named else "of this user"
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write the cache {place}: {reason}; set {VARIABLE} to a writable folder") from error
    return folder


def _default() -> Path:
    earlier = Path.home() / ".cache" / "shoal"  # the default on every platform once, and still the one of Linux
    return earlier if earlier.is_dir() else platformdirs.user_cache_path("shoal", appauthor=False)
