"""Lines of a host's page in the docs, run as they are typed there; without those that name Shoal: plain PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "hosts"
_BUDGET = "2GiB"  # on every page


def block(page: str, number: int = 0, language: str = "python") -> str:
    """One of the page's blocks of code."""
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)[number]


def run(code: str, budget: int | None, **names: Any) -> dict[str, Any]:
    """Run a block with a budget in place of the page's; None: without the lines that name Shoal.

    What is left must be plain PyTorch: lines that compile would do so with the default backend, which is Inductor.

    Args:
        names: what the lines find: models, data.

    Returns:
        All names that are there at the end.
    """
    if budget is None:
        code = "".join(line for line in code.splitlines(keepends=True) if "shoal" not in line.lower())
        assert not re.search(r"torch\.compile\(|\bcompile[\"']?\s*[=:]\s*True\b(?<!args\.compile = True)", code), code
    else:
        assert _BUDGET in code
        code = code.replace(_BUDGET, str(budget))
    exec(compile(code, "a page of docs/hosts", "exec"), names)
    return names
