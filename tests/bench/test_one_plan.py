"""The benchmark of one plan over every means: what is compared, what counts as slower, and that it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench import one_plan
from bench.frame import WrongResult
from bench.network import Setting
from bench.one_plan import (
    check,
    is_slower,
    known_rows,
    measure_network,
    network_table,
    of_all_variants,
    summary,
    summary_line,
)
from bench.plain import Plain
from bench.workload import make_workload
from shoal import fuse_batchnorm
from shoal.core.variant import WHOLE, Candidate, Variant
from shoal.engine.plan import plan as plan_model
from tests.bench.small import Small, put_in_place
from tests.raising import raising


def found(added: float | None, **more: Any) -> dict[str, Any]:
    if added is None:
        return {"met": False, "exceeded": False, "least_feasible_bytes": 7 * 2**20}
    return {
        "met": True,
        "exceeded": False,
        "added_percent": added,
        "difference_percent": -0.5,
        "step_off_percent": 4.0,
        "predicted_peak_bytes": 2**20,
        "measured_peak_bytes": 2**20,
        "variant": "batch norm fused (bnff)",
        **more,
    }


def result(monet: float | None = None, **contenders: dict[str, Any]) -> dict[str, Any]:
    plain = {"peak_bytes": 2**21, "seconds": [1.0, 3.0], "parameters_and_gradients_percent": 9.0}
    row = {"share": 53.0, "budget_bytes": 2**20, "monet_percent": monet, "contenders": contenders}
    return {"network": "resnet50", "setting": {"batch": 2, "image": 32}, "plain": plain, "rows": [row]}


@pytest.mark.parametrize(
    ("contenders", "slower"),
    [
        ({"recompute": found(10.0), "exact": found(12.9)}, False),
        ({"recompute": found(10.0), "exact": found(13.1)}, True),
        ({"recompute": found(10.0), "recompute, fuse": found(-9.0), "exact": found(2.0)}, True),
        ({"recompute": found(None), "exact": found(40.0)}, False),
        ({"recompute": found(40.0), "exact": found(None)}, True),
        ({"recompute": found(10.0), "exact": found(10.0), "lossy": found(1.0)}, False),  # another function
    ],
)
def test_exact_may_be_three_percent_slower_than_the_best_single_means(contenders: dict[str, Any], slower: bool) -> None:
    assert is_slower(contenders) == slower


def test_totals_count_what_ran_and_compare_exact_with_monet() -> None:
    results = [
        result(5.0, recompute=found(3.0), exact=found(2.4, difference_percent=-3.0), lossy=found(None)),
        result(5.0, recompute=found(3.0), exact=found(2.6, step_off_percent=-11.0), lossy=found(2.0)),
    ]
    totals = summary(results)
    assert (totals["budgets"], totals["met"], totals["infeasible"], totals["exceeded"]) == (6, 5, 1, 0)
    assert (totals["peak_within_2_percent"], totals["step_within_10_percent"], totals["ran"]) == (4, 4, 5)
    assert (totals["half_of_monet"], totals["compared_with_monet"]) == (1, 2)
    assert summary_line(totals).startswith("5 of 6 budgets met, 0 exceeded, 1 infeasible; of 5 that ran")


def test_a_row_where_nothing_fits_says_what_would() -> None:
    table = network_table(result(recompute=found(None), exact=found(-20.0)))
    cells = [list(column.cells) for column in table.columns]
    assert cells[3] == ["infeasible", "yes"] and cells[4] == ["≥ 7.000 MiB", "1.000 MiB"]
    assert cells[7] == ["", "-20.0 %"]


def test_percents_are_of_the_models_own_form_though_another_is_chosen() -> None:
    own = plan_model(Small(), torch.empty(2, 3, 16, 16))
    unit_seconds = own.predicted_seconds
    candidates = (
        Candidate(WHOLE, 42, 2 * unit_seconds, 9, 2.5 * unit_seconds, 3 * unit_seconds, 9, "slower"),
        Candidate(Variant(fuse="bnff"), 45, unit_seconds, 9, 0.5 * unit_seconds, unit_seconds, 9, "chosen"),
        Candidate(Variant(depth=0.5, grid=(2, 2)), 0, 0.0, 0, None, None, None, "computes 90 % more"),
    )
    columns = of_all_variants(replace(own, variant=Variant(fuse="bnff"), candidates=candidates))
    assert columns["predicted_added_percent"] == pytest.approx(-50)
    assert columns["lower_bound_percent"] == pytest.approx(-75)
    alone = of_all_variants(own)
    assert (alone["predicted_added_percent"], alone["lower_bound_percent"]) == (0.0, 0.0)


def test_a_fused_network_computes_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)
    plain = Plain(make_workload("googlenet", 2, 16))
    fused = fuse_batchnorm(plain.workload.shared_copy(), when="always")
    assert check(plain, "exact", fused, "fused") == "same function"
    with raising(WrongResult, "PyTorch"):
        check(plain, "recompute", fused, "fused")


class Halved(nn.Module):
    def __init__(self, model: nn.Module, *, gradients: bool) -> None:
        super().__init__()
        self.model, self.gradients = model, gradients

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.model(images)
        return 0.5 * outputs + 0.5 * outputs.detach() if self.gradients else 0.5 * outputs


@pytest.mark.parametrize("gradients", [True, False])
def test_another_function_is_not_let_pass(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)
    plain = Plain(make_workload("googlenet", 2, 16))
    assert plain.reference.check_function(plain.forward, "itself") == "equal bits"
    wrong = Halved(plain.workload.shared_copy(), gradients=gradients)
    with pytest.raises(WrongResult):
        plain.reference.check_function(wrong, "halved")


def test_a_run_that_was_interrupted_goes_on_and_a_budget_below_the_parameters_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in_place(monkeypatch)
    kept: list[dict[str, Any]] = []

    def interrupted(result: dict[str, Any]) -> None:
        kept.append(json.loads(json.dumps(result)))
        raise KeyboardInterrupt

    measured = partial(measure_network, "googlenet", Setting(2, 16), [1.0, 2.0], ["recompute"], 1, 0)
    with pytest.raises(KeyboardInterrupt):
        measured(keep=interrupted)
    known = known_rows(kept[0], Setting(2, 16), ["recompute"])
    assert list(known) == [1.0]
    again = measured(known=known)
    with pytest.raises(KeyboardInterrupt):
        partial(measured, known={2.0: again["rows"][0]})(keep=interrupted)
    assert [row["share"] for row in kept[-1]["rows"]] == [2.0, 1.0], "what was known of later budgets is kept"
    assert [row["share"] for row in again["rows"]] == [2.0, 1.0] and again["rows"][1] is known[1.0]
    for setting, allowed in ((Setting(4, 16), ["recompute"]), (Setting(2, 16), ["recompute", "exact"])):
        assert not known_rows(kept[0], setting, allowed), "of another step, or a contender is missing"
    for row in again["rows"]:
        found = row["contenders"]["recompute"]
        assert row["budget_bytes"] < again["plain"]["parameter_bytes"] and not found["met"]
        assert 2 * again["plain"]["parameter_bytes"] < found["least_feasible_bytes"] < again["plain"]["peak_bytes"]


@pytest.mark.slow
def test_a_quick_run_fills_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    monkeypatch.setattr("shoal.engine.search.split_variants._DEPTHS", (0.5,))
    monkeypatch.setattr("shoal.engine.search.split_variants._PARTS", (2,))
    asked = ["--quick", "--networks", "googlenet", "--shares", "80", "--image", "32", "--allow", "recompute,exact"]
    asked += ["--out", str(tmp_path)]
    assert one_plan.main(asked) == 0
    (path,) = tmp_path.glob("one_plan_*.json")
    ((fits,),) = [one["rows"] for one in json.loads(path.read_text())["results"]]
    for allow, one in fits["contenders"].items():
        if one["met"]:
            assert one["measured_peak_bytes"] <= fits["budget_bytes"] and one["seconds"], allow
            assert one["variant"] == "unmodified" or "equal bits" not in one["exactness"], allow
    assert fits["contenders"]["recompute"]["exactness"] == "equal bits"
    assert fits["contenders"]["exact"]["exactness"] in ("equal bits", "same function")
    assert "exact more than 3 % slower" in capsys.readouterr().out.replace("\n", " ")


def test_networks_of_timm_are_skipped_where_it_does_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    asked = ["--quick", "--networks", "timm/efficientnet_b0", "--out", str(tmp_path)]
    assert one_plan.main(asked) == 3
    said = capsys.readouterr()
    assert "timm/efficientnet_b0 needs timm and torchvision, which do not import here" in said.err.replace("\n", " ")


def test_networks_of_timm_have_their_names_seed_and_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model={"small": Small()}.__getitem__))
    workload = make_workload("timm/small", 2, 16)
    assert workload.images.shape == (2, 3, 16, 16) and workload.target.shape == (2,)
    assert workload.images.is_contiguous(memory_format=torch.channels_last) and workload.model.training


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--networks", "resnet5"], "--networks resnet5: give some of mobilenet_v2, "),
        (["--shares", "0"], "above 0"),
        (["--batch", "0"], "--batch 0: give 1 or more"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one_plan.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.one_plan: ") and reported in error
