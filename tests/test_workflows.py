"""What GitHub's workflows would type exists: targets of make, scripts, and the jobs that others wait for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_what_a_workflow_types_is_there(path: Path) -> None:
    text = path.read_text()
    typed = re.findall(r"^ +- run: (.+)$", text, re.M)
    assert len(typed) == len(re.findall(r"\brun:", text)), "a step's commands stand in one line"
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M))
    for line in typed:
        assert set(re.findall(r"\bmake ([a-z0-9-]+)", line)) <= targets, line
        for script in re.findall(r"(?<![\w/.-])(?:tests|\.ci)/[\w/.-]+", line):
            assert os.access(ROOT / script, os.X_OK), line
    jobs = re.findall(r"^  (\w+):$", text.partition("\njobs:\n")[2], re.M)
    for needed in re.findall(r"^    needs: \[?(.+?)\]?$", text, re.M):
        assert set(needed.split(", ")) <= set(jobs), needed
