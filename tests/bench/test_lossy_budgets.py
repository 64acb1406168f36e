"""The benchmark of lossy budgets: what is compared, and what counts as faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import lossy_budgets
from bench.lossy_budgets import summary_line, verdict


def row(exact: float | None, lossy: float | None) -> dict[str, Any]:
    def columns(added: float | None) -> dict[str, Any]:
        return {"feasible": added is not None, "added_percent": added, "least_feasible_bytes": 7}

    return {"exact": columns(exact), "lossy": columns(lossy)}


@pytest.mark.parametrize(
    ("exact", "lossy", "reported"),
    [
        (40.0, 9.0, "faster"),
        (10.0, 9.0, "as fast"),
        (9.0, 40.0, "slower"),
        (None, 40.0, "alone feasible"),
        (None, None, "infeasible"),
    ],
)
def test_two_percent_of_the_plain_step_are_noise(exact: float | None, lossy: float | None, reported: str) -> None:
    assert verdict(row(exact, lossy)) == reported
    assert f"{reported} in 1" in summary_line([{"rows": [row(exact, lossy)]}])


@pytest.mark.slow
def test_it_runs_and_keeps_its_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--quick", "--repeats", "1", "--budgets", "78", "--out", str(tmp_path)]
    assert lossy_budgets.main(how) == 0
    (path,) = tmp_path.glob("lossy_budgets_*.json")
    (result,) = json.loads(path.read_text())["results"]
    assert [row["share"] for row in result["rows"]] == [78.0]
    for each in result["rows"]:
        for contender in ("exact", "lossy"):
            found = each[contender]
            if found["feasible"]:
                assert found["measured_peak_bytes"] <= each["budget_bytes"]
                assert found["measured_peak_bytes"] == pytest.approx(found["predicted_peak_bytes"], rel=0.02)
                assert bool(found["gradient_errors"]) == bool(found["encoded_storages"])
                assert all(0 < error < 0.1 for error in found["gradient_errors"].values())
        assert not each["exact"]["feasible"] or each["exact"]["encoded_storages"] == 0
    shown = capsys.readouterr().out
    assert "exact adds" in shown and "1 budgets: with encoding" in shown


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--networks", "resnet5"], "--networks resnet5: give some of"),
        (["--budgets", "half"], "expected percentages"),
        (["--budgets", "0"], "above 0"),
        (["--quick", "--codec", "one_bit"], "not for activations"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lossy_budgets.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.lossy_budgets: ") and reported in error
