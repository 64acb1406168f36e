"""Training over a shaped link: every contender's weights end as the same bits on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import train_link
from bench.frame import WrongResult
from bench.gradient_contenders import NONE
from bench.link_lab import why_not
from tests.bench.forked_lab import put_in_place

_REASON = why_not()
TREE = "shoal dynamic_tree"


@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
@pytest.mark.parametrize(("wrapper", "share"), [((), 0.35), (("--sharded",), 0.75)])  # sharded weights travel whole
def test_a_quick_run_trains_over_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapper: tuple[str, ...], share: float
) -> None:
    put_in_place(monkeypatch)
    settings = ["--quick", "--network", "mobilenet_v2", "--ranks", "2", "--links", "1", *wrapper]
    assert train_link.main([*settings, "--contenders", f"{NONE};{TREE}", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("train_link_*.json")
    (result,) = json.loads(path.read_text()).values()
    assert all(row["same_on_all_ranks"] for row in result["rows"].values())
    assert result["rows"][TREE]["sent_bytes"] < share * result["rows"][NONE]["sent_bytes"]


def test_weights_that_differ_between_ranks_are_told() -> None:
    def rank(same: bool) -> dict[str, Any]:
        row = {"seconds": [1.0], "sent_bytes": [1], "reported_bytes": [None], "error_percent": None, "reason": ""}
        return {"model": "m", "elems": 4, "rows": {TREE: {**row, "same_on_all_ranks": same, "losses": [1.0]}}}

    assert train_link.gathered([rank(True)] * 2, 2)["rows"][TREE]["loss"] == 1.0
    with pytest.raises(WrongResult):
        train_link.gathered([rank(True), rank(False)], 2)


def test_an_unknown_contender_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_link.main(["--contenders", "magic", "--out", str(tmp_path)]) == 2
    assert "bench.train_link: argument --contenders: 'magic': contenders are nothing sent;" in capsys.readouterr().err
