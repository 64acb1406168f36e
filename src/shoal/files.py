"""Whole files or none: every file Shoal writes appears complete under its name or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from shoal.errors import InputError


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], object]) -> Path:
    """Let `write` fill a temporary file beside `path`, flush it to disk, then rename it to `path`.

    An interruption or a full disk leaves the earlier file, if any, untouched.

    Raises:
        InputError: the folder does not exist, is not writable, or the disk is full.
    """
    path = Path(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp is private by default; readers decide by their umask
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot write {path}: {reason}; give a writable folder with free space") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8, whole or not at all."""
    return write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: str | Path, value: Any) -> Path:
    """Write `value` as indented JSON, whole or not at all."""
    return write_text(path, json.dumps(value, indent=1) + "\n")
