"""Lines of a host's page in the docs, run as they are typed there; without those that name Shoal: plain PyTorch."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

PAGES = Path(__file__).parents[2] / "docs" / "hosts"
_BUDGET = "2GiB"  # on every page


def block(page: str, number: int = 0, language: str = "python") -> str:
    """One of the page's blocks of code."""
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)[number]


def run(code: str, budget: int | None, **names: Any) -> dict[str, Any]:
    """Run a block with a budget in place of the page's; None: without the lines that name Shoal.

    What is left of those is plain PyTorch: `torch.compile` in it is an error, where it would be called with its default
    backend.

    Args:
        names: what the lines find: models, data.

    Returns:
        All names that are there at the end.
    """
    if budget is None:
        code = "".join(line for line in code.splitlines(keepends=True) if "shoal" not in line.lower())
    else:
        assert _BUDGET in code
        code = code.replace(_BUDGET, str(budget))
    plain = mock.patch("torch.compile", side_effect=AssertionError("a plain run calls torch.compile"))
    with plain if budget is None else nullcontext():
        exec(compile(code, "a page of docs/hosts", "exec"), names)
    return names
