"""Test errors of an earlier run of a benchmark that trains, so that `--resume` need not train them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import InputError


def earlier_errors(path: Path, pace: Mapping[str, Any], wrote: str) -> Any:
    """`errors_percent` of the file that `wrote`, a benchmark, left.

    Raises:
        InputError: the file cannot be read, or its runs had another pace.
    """
    try:
        earlier = json.loads(path.read_text())
        theirs, errors = earlier["pace"], earlier["errors_percent"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--resume {path}: {error}; give a file that {wrote} wrote") from error
    ours = json.loads(json.dumps(dict(pace)))
    if theirs != ours:
        raise InputError(f"--resume {path}: its runs had {theirs}, these have {ours}; ask for the same, or run anew")
    return errors
