"""What several commands read in the same way."""

from __future__ import annotations

from shoal.errors import InputError


def patch_grid(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.strip().isdigit() for part in parts):
        raise InputError(f"--grid {text}: expected numbers of patches with an x in between, such as 2x2")
    return tuple(int(part) for part in parts)
