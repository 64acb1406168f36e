"""`torchrun ... -m shoal train`: one display, one set of files, one line for a mistake."""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.app.training.ranks import Ranks
from tests.app.test_cli import PLAIN, invoke
from tests.app.training.tiny import put_in_place
from tests.ranks import run_on_ranks


def started(folder: Path, port: int) -> tuple[int, int]:
    """What torchrun says of itself, to a rank that has not joined the others."""
    os.chdir(folder)
    rank, count = dist.get_rank(), dist.get_world_size()
    where = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in where.items()}
    return rank, count


def trained(folder: Path, port: int) -> tuple[int, str]:
    """What this rank's command ends with and shows."""
    started(folder, port)
    dist.destroy_process_group()  # the command joins by itself
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(patch, folder)
        files = ["--out", "run", "--json", "result.json"]
        done = invoke("train", *PLAIN, *files, "--compress-gradients", "dynamic_tree")
    return done.exit_code, done.output


def test_two_ranks_are_shown_as_one(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    (code, shown), (other_code, other_shown) = run_on_ranks(trained, 2, tmp_path, port)
    assert code == other_code == 0, shown + other_shown
    assert shown.count("epoch 1/1  loss") == shown.count("test accuracy") == 1 and other_shown == ""
    assert "gradients sent" in shown
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint.pt"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2 and result["compress_gradients"] == "dynamic_tree"
    assert result["traffic"]["steps"] == len(result["losses"]) == 3
    sent = result["traffic"]["total"]["gradients"]
    assert 0 < sent["sent_bytes"] < sent["raw_bytes"]


def mistaken(folder: Path) -> tuple[int, str]:
    """What this rank's command ends with and says."""
    rank, count = started(folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(rank, count, grouped=True)  # they have met already
        patch.setattr(import_module("shoal.app.cli.train"), "joined", lambda *_: nullcontext(ranks))
        done = invoke("train", *PLAIN, "--batch", "7", "--out", "run")
    return done.exit_code, done.stderr


def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    (code, said), (other_code, other_said) = run_on_ranks(mistaken, 2, tmp_path)
    assert code == other_code == 2
    assert (said + other_said).count("--batch 7 over 2 ranks: give a multiple of 2") == 1
    assert (said + other_said).count("\n") == 1
