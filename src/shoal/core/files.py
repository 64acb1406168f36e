"""Atomic writes: every file Shoal writes appears complete under its name or not at all. And the cache folder."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import IO, Any

import platformdirs

from shoal.core import arguments
from shoal.errors import InputError

_PARTIAL = ".partial"
_CACHE = "SHOAL_CACHE"


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], object]) -> Path:
    """Let `write` fill a temporary file next to `path`, flush it to disk, then rename it to `path`.

    An interruption or a full disk leaves the earlier file, if any, untouched. What a killed process left of an earlier
    attempt is removed.

    Raises:
        InputError: the folder does not exist, is not writable, or the disk is full.
    """
    path = arguments.path("path", path)
    temporary = ""
    try:
        remove_partials(path.parent, path.name)
        file, temporary = _locked_partial(path)
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp is private by default; readers decide by their umask
            os.replace(temporary, path)  # before it is closed: its lock keeps others from removing it
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot write {path}: {reason}; give a writable folder with free space") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
    return path


def remove_partials(folder: Path, name: str = "") -> None:
    """Remove the temporary files that killed processes left in `folder`, of the file `name` or of any.

    One that a living process writes is locked by it, and stays.
    """
    try:
        found = [entry.path for entry in os.scandir(folder) if _is_partial(entry, name)]
    except OSError:
        return  # writing there raises the error
    for left in found:
        try:
            handle = os.open(left, os.O_RDONLY)
        except OSError:  # gone, or another user's
            continue
        try:
            if try_lock(handle) and os.path.exists(left):
                os.unlink(left)
        except OSError:
            pass
        finally:
            os.close(handle)


def try_lock(handle: int) -> bool:
    """Lock an open file or folder for this process until it is closed, however that ends; False where another has.

    Raises:
        OSError: this file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_partial(entry: os.DirEntry[str], name: str) -> bool:
    named = entry.name.startswith(f".{name}." if name else ".") and entry.name.endswith(_PARTIAL)
    return named and entry.is_file(follow_symlinks=False)  # to open a FIFO waits for whoever writes to it


def _locked_partial(path: Path) -> tuple[IO[bytes], str]:
    """A new temporary file next to `path`, open and locked, and its name."""
    while True:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PARTIAL)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # no locks here: then nothing removes it either
            return os.fdopen(handle, "wb"), temporary
        if os.path.exists(temporary):
            return os.fdopen(handle, "wb"), temporary
        os.close(handle)  # another process took it for left over, between the two calls


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8, whole or not at all."""
    return write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: str | Path, value: Any) -> Path:
    """Write `value` as indented JSON, whole or not at all."""
    return write_text(path, json_text(value) + "\n")


def json_text(value: Any, *, indent: int | None = 1) -> str:
    """`value` as JSON, in which a number that is not finite is null: JSON has no word for it.

    Args:
        value: of what JSON knows.
        indent: of each level, in spaces; None: all in one line, in less than half the time.

    >>> json_text([1.5, float("nan")])
    '[\\n 1.5,\\n null\\n]'
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def cache_dir() -> Path:
    """The folder named by SHOAL_CACHE, else `~/.cache/shoal` if it exists, else the platform's; created if missing.

    Raises:
        InputError: it cannot be created or written to.
    """
    named = os.environ.get(_CACHE)
    try:
        folder = Path(named).expanduser() if named else _default()
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits do not show a read-only mount or a full quota; creating a file does.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        place = f"{_CACHE}={named}" if named else "of this user"
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write the cache {place}: {reason}; set {_CACHE} to a writable folder") from error
    return folder


def _default() -> Path:
    earlier = Path.home() / ".cache" / "shoal"  # the default on every platform once, and still the one of Linux
    return earlier if earlier.is_dir() else platformdirs.user_cache_path("shoal", appauthor=False)
