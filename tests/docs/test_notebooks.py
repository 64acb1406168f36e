"""The notebooks of the tutorials are their pages, run from the first cell to the last. `make notebooks` makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_a_notebook_is_its_page_and_has_run(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)\n```$", page.read_text(), re.S | re.M)
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in code] == blocks, "make notebooks"
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "make notebooks"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and all(output["output_type"] != "error" for output in outputs)
    assert page.with_suffix(".ipynb").name in page.read_text(), "the page leads to its notebook"
