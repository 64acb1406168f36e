"""The batch that fits when split: every row a checked plan, and more images where patches are smaller."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import split_memory
from shoal.memory.limit import memory_limit
from tests.bench.small import put_in_place


@pytest.fixture(autouse=True)
def _small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)


def test_in_patches_no_fewer_images_fit_and_each_row_is_beside_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [row for row in split_memory.CONTENDERS if row[0] == "split, hmms"]
    monkeypatch.setattr(split_memory, "CONTENDERS", few)
    rows = {row["contender"]: row for row in split_memory.simulated("small", 16, 2**19)}
    assert rows["plain PyTorch"]["times"] == 1.0 and rows["plain PyTorch"]["loss_percent"] == 0.0
    assert rows["split, hmms"]["batch"] >= rows["plain PyTorch"]["batch"]
    assert all(row["peak_bytes"] <= 2**19 for row in rows.values())


def test_within_a_memory_limit_more_images_train_by_plan_than_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_memory, "_REPEATS", 1)
    ways = [("plain PyTorch", None, None), ("everything kept", None, "keep_all")]
    monkeypatch.setattr(split_memory, "REHEARSED_WAYS", ways)
    with memory_limit(None):
        held = torch.empty(100_000)  # by others, as earlier steps do
    plain, planned = split_memory.rehearsed("small", 64, 8)["rows"]
    assert planned["batch"] >= plain["batch"] >= 8
    del held
    assert plain["images_per_second"] > 0 and planned["images_per_second"] > 0


SIZES = st.integers(1, 40)


@given(largest=st.integers(0, 300), first=SIZES, apart=SIZES, most=st.integers(1, 200))
def test_the_largest_batch_is_found_and_none_is_tried_twice(largest: int, first: int, apart: int, most: int) -> None:
    tried: list[int] = []

    def runs(batch: int) -> bool:
        tried.append(batch)
        return batch <= largest

    found = split_memory.largest_of(runs, first, apart, most)
    assert found == 0 or (found in tried and found <= largest)
    assert found + apart > min(largest, most)
    assert len(set(tried)) == len(tried)
    assert min(tried) > 0 and max(tried) <= most


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert split_memory.main(["--quick", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("bench.split_memory: ")
