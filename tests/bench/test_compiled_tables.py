"""What the tables of compiled regions say: the best of torch.compile that fits, and ratios of one run."""

from __future__ import annotations

from typing import Any

import pytest

from bench.compiled_contenders import EAGER, INDUCTOR
from bench.compiled_tables import error_table, fastest_within, network_table, rows_of
from bench.themes import markdown_of


def row(peak_bytes: int, *seconds: float, **more: Any) -> dict[str, Any]:
    off = {"error": 1e-6, "median_error": 2e-6, "largest_error": 3e-5}
    return {"measured_peak_bytes": peak_bytes, "seconds": list(seconds), **off, **more}


RESULT = {
    "network": "net",
    "setting": {"batch": 2, "image": 8},
    "precision": "float32",
    "reference": "float64",
    "complete": True,
    "plain_peak_bytes": 100,
    "contenders": {
        EAGER: row(100, 1.0, 1.0),
        INDUCTOR: row(110, 0.5, 0.5),
        f"{INDUCTOR} at 0.5": row(60, 0.7, 0.7),
        f"{INDUCTOR} at 0": row(50, 0.9, 0.9),
        "shoal eager at 60 %": row(59, 1.2, 1.4, share=60.0, budget_bytes=60, predicted_peak_bytes=59),
        "shoal compiled at 60 %": row(61, 0.6, 0.7, share=60.0, budget_bytes=60, predicted_peak_bytes=60),
    },
    "refused": {"shoal eager at 33 %": "does not fit", "shoal compiled at 33 %": "does not fit"},
}


def test_of_what_fits_the_fastest_stands_for_torch_compile() -> None:
    found = [fastest_within(RESULT, budget_bytes) for budget_bytes in (200, 109, 59, 49)]
    assert [one and one["measured_peak_bytes"] for one in found] == [110, 60, 50, None]


def test_a_setting_with_wrong_gradients_is_marked_and_stands_for_nothing() -> None:
    wrong = {**RESULT["contenders"][INDUCTOR], "error": 0.5}
    result = {**RESULT, "contenders": {**RESULT["contenders"], INDUCTOR: wrong}}
    fastest = fastest_within(result, 200)
    assert fastest is not None and fastest["measured_peak_bytes"] == 60
    assert "| torch.compile, wrong gradients | 500.0 |" in markdown_of(network_table(result))


def test_gradients_that_could_not_be_checked_are_said() -> None:
    unchecked = {"measured_peak_bytes": 110, "seconds": [0.5, 0.5], "unchecked": "does not compile"}
    result = {**RESULT, "contenders": {**RESULT["contenders"], INDUCTOR: unchecked}}
    assert "| torch.compile, not checked | 500.0 |" in markdown_of(network_table(result))
    assert "| torch.compile |  |  |  |" in markdown_of(error_table(result))


def test_rows_are_ratios_of_one_run_and_say_what_is_over_its_budget() -> None:
    eager, ours, *refused = rows_of(RESULT)
    assert (eager["of_eager"], eager["of_ours"], eager["broken"]) == (pytest.approx(1.3), None, False)
    assert ours["of_inductor"] == pytest.approx(1.3) and ours["of_theirs"] == pytest.approx(0.65 / 0.7)
    assert ours["of_ours"] == pytest.approx(0.5) and ours["off"] == pytest.approx(100 / 60) and ours["broken"]
    assert [one["who"] for one in refused] == ["shoal eager at 33 %", "shoal compiled at 33 %"]
    text = markdown_of(network_table(RESULT))
    assert "| shoal compiled at 60 % | 650.0 | 0.65 | 1.30 | 0.93 | 0.50 | 61.0 | +1.67 |" in text
    assert "| shoal eager at 33 % | does not fit |" in text


def test_errors_are_said_of_every_contender_but_the_reference() -> None:
    table = error_table(RESULT)
    assert str(table.title).endswith("gradients off from float64")
    assert "| torch.compile at 0.5 | 1e-06 | 2e-06 | 3e-05 |" in markdown_of(table)
