"""The layout benchmark runs and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import layout
from tests.bench.small import put_in_place


def test_every_figure_is_above_the_most_bytes_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    assert layout.main(["--quick", "--networks", "mobilenet_v2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("layout_*.json")
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["steps"]] == ["mobilenet_v2, all kept", "mobilenet_v2, half the bytes"]
    for row in result["steps"]:
        assert row["most_bytes"] <= row["search"]["arena_bytes"] <= row["best_fit"]["arena_bytes"]
        assert row["best_fit"]["fragmentation"] == row["best_fit"]["arena_bytes"] / row["most_bytes"]
    assert "of 2 steps within 1.02" in capsys.readouterr().out


def test_an_unknown_network_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert layout.main(["--networks", "resnet5", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.layout: --networks resnet5: give some of")
