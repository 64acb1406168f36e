"""The accuracy benchmark of parallel training trains on real ranks, resumes, and computes the statistics it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import parallel_accuracy
from bench.parallel_accuracy import CODECS, DATA, EXACT, MODEL, QUICK, error_percent, f_test, images_of
from tests.ranks import run_on_ranks


def _errors() -> list[float]:
    data = images_of(QUICK)
    data["train"] = data["train"][0][:64], data["train"][1][:64]
    runs = [(DATA, EXACT), (DATA, "one_bit"), (MODEL, EXACT), (MODEL, "linear")]
    return [error_percent(how, codec, 0, QUICK, data) for how, codec in runs]


def test_both_ways_train_alike_without_a_codec_and_with_one() -> None:
    first, second = run_on_ranks(_errors, 2)

    assert first == second
    assert all(0 <= error <= 100 for error in first)
    assert first[0] == first[2]  # a few steps: float32's order of sums does not change what is predicted


def test_what_is_finished_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[tuple[str, str, int]] = []

    def errors(ranks: int, at: str, pace: Any, runs: Any) -> Iterator[float]:
        for how, codec, seed in runs:
            trained.append((how, codec, seed))
            yield 10.0 + seed

    monkeypatch.setattr(parallel_accuracy, "errors_by_run", errors)
    arguments = ["--quick", "--ranks", "2"]
    assert parallel_accuracy.main([*arguments, "--seeds", "2", "--out", str(tmp_path / "a")]) == 0
    (first,) = (tmp_path / "a").glob("*.json")
    trained.clear()
    again = [*arguments, "--seeds", "3", "--resume", str(first), "--out", str(tmp_path / "b")]
    assert parallel_accuracy.main(again) == 0
    assert trained == [(how, codec, 2) for how, codecs in CODECS.items() for codec in codecs]
    (second,) = (tmp_path / "b").glob("*.json")
    rows = json.loads(second.read_text())["errors_percent"]["2"]
    assert rows[MODEL]["linear"] == [10.0, 11.0, 12.0]
    assert "F(4,10)" in capsys.readouterr().out


def test_groups_apart_are_told_from_groups_alike() -> None:
    apart = f_test([[10.0, 10.1, 9.9], [20.0, 20.1, 19.9]])
    alike = f_test([[10.0, 12.0, 14.0], [10.1, 12.1, 13.9]])

    assert apart.endswith("p=0.00")
    assert float(alike.split("p=")[1]) > 0.9


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--ranks", "two"], ["--ranks", "0"]])
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parallel_accuracy.main([*arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.parallel_accuracy: ")
