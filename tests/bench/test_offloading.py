"""The offloading benchmark: who is compared with whom, and what counts as beaten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import offloading
from bench.offloading import Measured, front, links, verdicts
from shoal.core import presets
from tests.bench.small import put_in_place


def run(name: str, peak_bytes: int) -> Measured:
    return Measured(name, "", torch.relu, peak_bytes)


def test_the_front_is_what_nothing_beats_in_both_bytes_and_seconds() -> None:
    runs = [run("small and slow", 10), run("large and fast", 30), run("middling", 20), run("beaten", 25)]
    seconds = {"small and slow": 9.0, "large and fast": 1.0, "middling": 4.0, "beaten": 5.0}
    assert [one.name for one in front(runs, seconds)] == ["small and slow", "large and fast", "middling"]


def row(contender: str, added: float, inside: str = "", setting: str = "") -> dict[str, Any]:
    return {"contender": contender, "setting": setting, "inside": inside, "added_percent": added}


def test_a_contender_is_compared_with_joint_inside_its_own_bytes() -> None:
    rows = [
        row("hascoet", 20.0),
        row("hmms", 5.0),
        row("checkpointing", 30.0, setting="4 segments"),
        row("layerwise", 1.0),
        row("hascoet", 90.0, setting="without overlap"),
        row("joint", 3.0, inside="hascoet"),
        row("joint", 6.0, inside="hmms"),
        row("joint", 33.0, inside="checkpointing 4 segments"),
    ]
    assert verdicts(rows) == {
        "hascoet": "faster",
        "hmms": "equal",
        "checkpointing 4 segments": "slower",
        "layerwise": "none",
    }


def test_the_ablations_are_slower_links_of_the_same_device() -> None:
    target = presets.get("titanx-pcie")
    found = links(target, "cpu")
    assert found[""] == target
    slow, blocking = found["without pinned memory"], found["without overlap"]
    assert slow is not None and blocking is not None
    assert slow.link.to_host_bytes_per_second == offloading.PAGEABLE * target.link.to_host_bytes_per_second
    assert target.link.overlaps and not blocking.link.overlaps
    assert links(target, "cuda") == {"": None}


@pytest.mark.slow
def test_it_runs_and_every_planned_row_has_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    monkeypatch.setattr(offloading, "links", lambda target, device: {"": target})  # the other links only are slower
    monkeypatch.setattr(offloading, "_SHARES", ())
    every = offloading.contenders
    in_memory = lambda *of, **how: (one for one in every(*of, **how) if "file" not in one.setting)  # noqa: E731
    monkeypatch.setattr(offloading, "contenders", in_memory)
    assert offloading.main(["--quick", "--repeats", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("offloading_*.json")
    (result,) = json.loads(path.read_text())["results"]
    contenders = {row["contender"] for row in result["rows"]}
    assert {"hascoet", "hmms", "layerwise", "checkpointing", "joint"} <= contenders
    for row in result["rows"]:
        if "predicted_peak_bytes" in row:
            assert row["peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.02)
    assert "joint inside the bytes of" in capsys.readouterr().out


def test_an_unknown_network_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offloading.main(["--networks", "resnet5", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.offloading: --networks resnet5: give some of")
