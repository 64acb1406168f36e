"""`torchrun ... -m shoal train`: one display, one set of files, one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.test_cli import PLAIN, process

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, where = process("main()", "train", *PLAIN, *arguments)
    return subprocess.run(
        [*TORCHRUN, *command], capture_output=True, text=True, env={**where, "OMP_NUM_THREADS": "1"}, cwd=folder
    )


@pytest.mark.slow
def test_two_ranks_are_shown_as_one_and_a_mistake_is_reported_once(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--out", "run", "--json", "result.json", "--compress-gradients", "dynamic_tree")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1/1  loss") == done.stdout.count("test accuracy") == 1
    assert "gradients sent" in done.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint.pt"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2 and result["compress_gradients"] == "dynamic_tree"
    assert result["traffic"]["steps"] == len(result["losses"]) == 3
    sent = result["traffic"]["total"]["gradients"]
    assert 0 < sent["sent_bytes"] < sent["raw_bytes"]

    mistaken = torchrun(tmp_path, "--batch", "7", "--out", "run")
    assert mistaken.returncode != 0
    assert mistaken.stderr.count("batch=7 over 2 ranks: give a multiple of 2") == 1
    assert "shoal/app" not in mistaken.stderr  # torchrun shows its own traceback, not one of ours
