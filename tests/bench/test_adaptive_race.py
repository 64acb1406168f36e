"""A2DTWP over seeds: errors smoothed, seconds of mixed widths between the fixed ones, nothing trained twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import adaptive_race
from bench import adaptive_training as training
from bench.adaptive_race import full_elems, given_error, main, seconds_to
from bench.adaptive_training import AWP, AWP_TREE, BASELINE, TREE, smoothed, steps_to
from tests.bench.noise import noise_images

MEASURED = {"fixed": {BASELINE: 8.0, "24 bits": 6.0, "16 bits": 4.0, "8 bits": 2.0, TREE: 3.0}, "norms": 0.5}


def test_the_given_error_is_that_of_32_bits_after_four_fifths_and_looks_are_smoothed() -> None:
    run = {"steps": [10, 20, 30, 40, 50], "errors_percent": [90.0, 70.0, 80.0, 60.0, 20.0]}
    assert smoothed(run, 2) == [(20, 80.0), (30, 75.0), (40, 70.0), (50, 40.0)]
    assert given_error(run, 2) == 70.0
    assert (steps_to(run, 75.0, 2), steps_to(run, 39.0, 2)) == (30, None)


@pytest.mark.parametrize(("contender", "expected"), [(AWP, 10 * 2.5 + 10 * 3.5), (AWP_TREE, 10 * 3.5 + 10 * 4.0)])
def test_steps_of_mixed_widths_lie_between_the_fixed_ones_and_take_the_norms(contender: str, expected: float) -> None:
    run = {"widths": [(0, {"a": 1, "b": 1}), (10, {"a": 2, "b": 1}), (30, {"a": 4, "b": 4})]}
    by_block = {"a": ["a.x", "a.y"], "b": ["b"]}
    elems = {"a.x": 1, "a.y": 1, "b": 2}
    assert seconds_to(contender, run, 20, MEASURED, elems, by_block) == expected
    assert seconds_to("16 bits", run, 20, MEASURED, elems, by_block) == 80.0


def test_the_full_networks_weights_are_counted_without_making_them() -> None:
    channels = [(3, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512), (512, 512), (512, 512)]
    dense = [(512 * 7 * 7, 4096), (4096, 4096), (4096, 200)]  # table I
    assert list(full_elems("vgg_a").values()) == [9 * a * b for a, b in channels] + [a * b for a, b in dense]


def test_it_runs_and_trains_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adaptive_race, "images_of", lambda device, tests=None: noise_images())
    asked = ["--quick", "--seeds", "1", "--rounds", "1", "--out", str(tmp_path)]
    assert main(asked) == 0
    (path,) = tmp_path.glob("adaptive_race_*.json")
    result = json.loads(path.read_text())
    assert set(result["runs"]["vgg_a"]) == set(adaptive_race.CONTENDERS)
    sent = {name: found["sent_bytes"] for name, found in result["steps"]["vgg_a"]["measured"].items()}
    assert sent["8 bits"] < sent[TREE] < 1.02 * sent["8 bits"] < sent["16 bits"]  # a scale for each 4096 weights
    monkeypatch.setattr(training, "run_of", None)  # nothing may be trained again
    assert main([*asked, "--part", "training", "--error", "99", "--resume", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "99.0 %" in shown and AWP_TREE in shown


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        (["--networks", "lenet"], "--networks lenet: give some of"),
        (["--seeds", "0"], "--seeds 0: give 1 or more"),
        (["--resume", "nowhere.json"], "--resume nowhere.json: .*; give a file that bench.adaptive_race wrote"),
    ],
)
def test_wrong_arguments_are_one_line(
    asked: list[str], reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*asked, "--out", str(tmp_path)]) == 2
    assert re.match(f"bench.adaptive_race: {reported}.*\n$", capsys.readouterr().err)
