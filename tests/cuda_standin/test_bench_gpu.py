"""The script for the first minutes on a GPU runs through, and its bytes are those of a budget that is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"


def run(out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHON": sys.executable, "SHOAL_CACHE": str(out / "cache"), "QUICK": "1"}
    given["PERCENT"] = "400"  # a busy host leaves rows out for lack of time, which is none of what is asked here
    environment = {**os.environ, **given, **settings}
    return subprocess.run([SCRIPT, out], env=environment, capture_output=True, text=True, check=False)


def rows(out: Path, part: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / f"{part}.json").read_text())["rows"]
    return found


def test_every_part_writes_its_rows_and_the_verdict_reads_them(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for part in ("environment", "contract", "speed", "wall", "offload", "triton"):
        wrong = [row for row in rows(tmp_path, part) if row.get("error") and row["row"] != "plain PyTorch"]
        assert not wrong
    assert [row["row"] for row in rows(tmp_path, "contract")] == [
        *("plain PyTorch", "plain PyTorch again", "aot_eager"),
        *(f"step {number}" for number in range(1, 6)),
        *("Shoal against eager", "Shoal op by op against eager", "Shoal op by op against aot_eager"),
    ]
    assert {row["contender"] for row in rows(tmp_path, "speed") if row["row"] == "in turns"} == {
        "plain PyTorch",
        "Shoal at 75%",
        "Shoal at 75% in CUDA graphs",
        "torch.compile",
        "activation_memory_budget=0.5",
    }
    verdicts = {row["row"]: row["verdict"] for row in rows(tmp_path, "verdict")}
    for what in ("Triton runs", "predicted = allocated within 2 %", "no repairs", "each budget met"):
        assert verdicts[what] == "holds"
    assert verdicts["Shoal trains where plain PyTorch ends"] == "holds"


@pytest.mark.parametrize(("parts", "code"), [("environment verdict", 0), ("environment speeed", 2)])
def test_parts_can_be_left_out_and_are_known(tmp_path: Path, parts: str, code: int) -> None:
    done = run(tmp_path, PARTS=parts)
    assert done.returncode == code
    assert (tmp_path / "verdict.json").exists() == (code == 0)
    assert not (tmp_path / "contract.json").exists()
