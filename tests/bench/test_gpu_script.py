"""bench/gpu.sh on a host that is slow or fails: each part that ends early has a row that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_verdicts import verdicts

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"
# In the place of Python: there is a device, and a part does what the test says after its first row.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = - ]; then
  [ $# -eq 1 ] && { cat > /dev/null; exit 0; }
  exec {python} "$@"
fi
out=$(printf '%s\n' "$@" | sed -n '/--out/{n;p}')
part=$(printf '%s\n' "$@" | sed -n '/--part/{n;p}')
[ "$part" = contract ] && echo '{"rows": [{"row": "first"}]}' > "$out/$part.json"
{then}
"""


def run(folder: Path, then: str, **settings: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PYTHON.replace("{python}", sys.executable).replace("{then}", then))
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PARTS": "contract wall", **settings}
    return subprocess.run([SCRIPT, folder], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("then", "reason"), [("exec sleep 100", "stopped after 1 s; PERCENT=2 gives"), ("exit 7", "ended with 7")]
)
def test_a_part_that_ends_early_has_a_row_beside_those_it_wrote(tmp_path: Path, then: str, reason: str) -> None:
    done = run(tmp_path, then, PERCENT="1")
    assert done.returncode == 1
    found = {part: json.loads((tmp_path / f"{part}.json").read_text())["rows"] for part in ("contract", "wall")}
    assert [row["row"] for row in found["contract"]] == ["first", "ended early"]
    assert [row["row"] for row in found["wall"]] == ["ended early"]
    assert reason in found["contract"][-1]["error"]
    assert reason in done.stdout


def test_rows_of_an_earlier_run_are_not_taken_for_those_of_a_part_that_began_and_wrote_none(tmp_path: Path) -> None:
    (tmp_path / "wall.json").write_text(json.dumps({"rows": [{"row": "of yesterday"}]}))
    run(tmp_path, "exit 7", PARTS="wall")
    assert [row["row"] for row in json.loads((tmp_path / "wall.json").read_text())["rows"]] == ["ended early"]


def test_the_verdict_names_a_part_that_ended_early() -> None:
    rows = [{"row": "ended early", "error": "stopped after 60 s"}]
    assert ("wall", "ran to its end", "stopped after 60 s", False) in verdicts({"wall": rows})
    assert not any(what == "ran to its end" for _, what, _, _ in verdicts({}))


@pytest.mark.parametrize(
    ("repeats", "equal", "holds"), [(True, True, True), (True, False, False), (False, False, None)]
)
def test_bits_are_held_against_eager_pytorch_where_that_repeats_its_own(
    repeats: bool, equal: bool, holds: bool | None
) -> None:
    rows = [
        {"row": "plain PyTorch again", "equal": repeats},
        {"row": "Shoal op by op against eager", "equal": equal, "largest_difference": 0.0},
    ]
    (found,) = (row for row in verdicts({"contract": rows}) if "bit for bit" in row[1])
    assert found[3] is holds
