"""What an earlier run of a benchmark that trains wrote, so that `--resume` need not train it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InputError


def earlier(path: Path, parts: Sequence[str], wrote: str) -> dict[str, Any]:
    """The file that `wrote`, a benchmark, left.

    Args:
        path: of it.
        parts: what it must hold.
        wrote: for errors.

    Raises:
        InputError: the file cannot be read, or lacks one of them.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        for part in parts:
            found[part]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--resume {path}: {error}; give a file that {wrote} wrote") from error
    return found


def check_pace(path: Path, theirs: Mapping[str, Any], pace: Mapping[str, Any]) -> None:
    """
    Raises:
        InputError: the runs of the file had another pace than this run.
    """
    ours = json.loads(json.dumps(dict(pace)))
    if theirs != ours:
        raise InputError(f"--resume {path}: its runs had {theirs}, these have {ours}; ask for the same, or run anew")


def earlier_errors(path: Path, pace: Mapping[str, Any], wrote: str) -> Any:
    """`errors_percent` of the file that `wrote`, a benchmark, left.

    Raises:
        InputError: the file cannot be read, or its runs had another pace.
    """
    found = earlier(path, ("pace", "errors_percent"), wrote)
    check_pace(path, found["pace"], pace)
    return found["errors_percent"]
