"""The benchmark of gradient averaging runs in the link lab, and its checks and targets can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import allreduce, allreduce_rank, gradient_contenders
from bench.allreduce import check, check_errors, ring_bytes, verdicts
from bench.frame import WrongResult
from bench.gradient_contenders import AUTO, NONE
from bench.link_lab import why_not
from tests.bench.forked_lab import put_in_place
from tests.raising import raising

_REASON = why_not()
needs_lab = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
TREE = "shoal dynamic_tree"


def row(seconds: float = 1.0, **others: Any) -> dict[str, Any]:
    given = {"error_percent": 0.0, "same_on_all_ranks": True, "sent_bytes": 0, "reported_bytes": None}
    return {"seconds": seconds, "of_ring": 1.0, "reported_of_ring": None, **given, **others}


@needs_lab
def test_ranks_average_over_a_shaped_link_and_the_interface_counts_what_they_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(monkeypatch)
    settings = ["--quick", "--ranks", "2", "--links", "1", "--contenders", f"{NONE};fp16 hook;{TREE};{AUTO}"]
    assert allreduce.main([*settings, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("allreduce_*.json")
    (result,) = json.loads(path.read_text())["steps"].values()
    rows = result["rows"]
    assert rows[NONE]["error_percent"] < 1e-3
    assert rows[NONE]["sent_bytes"] >= ring_bytes(result["elems"], 2)  # and headers
    assert rows["fp16 hook"]["sent_bytes"] < 0.6 * rows[NONE]["sent_bytes"]
    assert rows[TREE]["reported_of_ring"] <= 0.26
    assert rows[TREE]["sent_bytes"] < 0.4 * rows[NONE]["sent_bytes"]
    assert f"{AUTO}: " in capsys.readouterr().out


def test_bytes_and_times_are_held_against_the_targets() -> None:
    good = {NONE: row(4.0), TREE: row(1.0, reported_of_ring=0.251, of_ring=0.25), AUTO: row(4.1)}
    assert verdicts(good, 1.0) == {
        TREE: "0.251 of 0.26: met; 4.0 of 3 times: met",
        AUTO: "1.0 of 3 times: NOT MET; +2.5 % of +2 %: NOT MET",
    }
    assert verdicts(good, 10.0)[TREE] == "0.251 of 0.26: met"
    assert "0.300 of 0.26: NOT MET" in verdicts({**good, TREE: row(reported_of_ring=0.3)}, None)[TREE]


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        (row(same_on_all_ranks=False), "ranks'"),
        (row(error_percent=5.0), ""),
        (row(error_percent=float("nan")), ""),
        (row(reported_bytes=4_000_000, sent_bytes=3_000_000), "4000000"),
    ],
)
def test_a_wrong_average_is_told(wrong: dict[str, Any], reported: str) -> None:
    check({TREE: row()})
    check_errors({TREE: row()})
    with raising(WrongResult, reported):
        check({TREE: wrong})
        check_errors({TREE: wrong})


@pytest.mark.parametrize("setting", [["--parts", "speed"], ["--models", "resnet5"]])
def test_an_unknown_name_is_one_line(setting: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allreduce.main([*setting, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.allreduce: ")


def test_a_network_at_half_its_widths_has_about_a_quarter_of_the_parameters() -> None:
    whole, half = (allreduce_rank.elems_of(allreduce_rank.shapes_of(name)) for name in ("vgg11", "vgg11/2"))
    assert whole == 132_863_336
    assert whole / 4 < half < whole / 3.8  # the classes stay


def test_ready_gradients_arrive_as_they_are() -> None:
    shapes = [(3, 4), (5,)]
    gradients = allreduce_rank.drawn(shapes, seed=1)
    module = allreduce_rank.ReadyGradients(shapes, gradients)
    module().backward()
    assert all(torch.equal(weight.grad, one) for weight, one in zip(module.parameters(), gradients, strict=True))


def test_every_contender_by_default_is_known() -> None:
    assert set(gradient_contenders.CONTENDERS) - {AUTO, gradient_contenders.EXACT} <= set(gradient_contenders.EVERY)
