"""`torchrun ... -m shoal train`: one display, one set of files, one line for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.app.training.ranks import Ranks
from tests.app.test_cli import PLAIN, invoke, process
from tests.ranks import run_on_ranks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, where = process("main()", "train", *PLAIN, *arguments)
    return subprocess.run(
        [*TORCHRUN, *command], capture_output=True, text=True, env={**where, "OMP_NUM_THREADS": "1"}, cwd=folder
    )


@pytest.mark.slow
def test_two_ranks_are_shown_as_one(tmp_path: Path) -> None:
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


def mistaken(folder: Path) -> tuple[int, str]:
    """What this rank's command ends with and says."""
    os.chdir(folder)
    rank, count = dist.get_rank(), dist.get_world_size()
    where = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in where.items()}
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(rank, count, grouped=True)  # they have met already
        patch.setattr(import_module("shoal.app.cli.train"), "joined", lambda *_: nullcontext(ranks))
        done = invoke("train", *PLAIN, "--batch", "7", "--out", "run")
    return done.exit_code, done.stderr


def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    (code, said), (other_code, other_said) = run_on_ranks(mistaken, 2, tmp_path)
    assert code == other_code == 2
    assert (said + other_said).count("batch=7 over 2 ranks: give a multiple of 2") == 1
    assert (said + other_said).count("\n") == 1
