"""The batch that fits when split: every row a checked plan, and more images where patches are smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import split_memory


def test_in_patches_no_fewer_images_fit_and_each_row_is_beside_plain_pytorch() -> None:
    rows = {row["contender"]: row for row in split_memory.simulated("alexnet", 96, 2**30)}
    assert rows["plain PyTorch"]["times"] == 1.0 and rows["plain PyTorch"]["loss_percent"] == 0.0
    assert rows["split, joint"]["batch"] >= rows["split, hmms"]["batch"] >= rows["plain PyTorch"]["batch"]
    assert all(row["peak_bytes"] <= 2**30 for row in rows.values())


@pytest.mark.slow
def test_behind_a_wall_more_images_train_by_plan_than_without() -> None:
    ran = split_memory.rehearsed("vgg19_cifar", 32, 2)
    plain, *ours = ran["rows"]
    assert plain["batch"] >= 2
    assert all(row["batch"] >= plain["batch"] for row in ours)


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert split_memory.main(["--quick", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("bench.split_memory: ")
