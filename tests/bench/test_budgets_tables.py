"""Tables and totals of results that were made up."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bench import budgets
from bench.chain import check_falling
from bench.frame import WrongResult
from bench.network import SHARES, monet_overhead_percent


def row(
    share: float, added: float | None, checkpoint: float | None = None, monet: float | None = None
) -> dict[str, Any]:
    if added is None:
        ours: dict[str, Any] = {"met": False, "exceeded": False, "least_feasible_bytes": 2**20, "error": "no plan"}
    else:
        ours = {
            "met": True,
            "exceeded": False,
            "predicted_peak_bytes": 1000,
            "measured_peak_bytes": 990,
            "difference_percent": -1.0,
            "added_percent": added,
            "lower_bound_percent": 1.0,
            "planning_seconds": 2.0,
        }
    theirs = (
        {"met": False} if checkpoint is None else {"met": True, "setting": "4 segments", "added_percent": checkpoint}
    )
    return {"share": share, "budget_bytes": 1000, "shoal": ours, "monet_percent": monet, "checkpoint": theirs}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    plain = {"peak_bytes": 2**21, "seconds": [1.0, 3.0], "parameters_and_gradients_percent": 9.0}
    return {"network": "resnet50", "setting": {"batch": 2, "image": 32}, "plain": plain, "rows": list(rows)}


@pytest.mark.parametrize(
    ("ours", "theirs", "reported"),
    [(5.0, 20.0, "faster"), (20.5, 20.0, "equal"), (25.0, 20.0, "slower"), (5.0, None, "alone")],
)
def test_a_verdict_compares_with_the_peer_at_the_same_bytes(ours: float, theirs: float | None, reported: str) -> None:
    assert budgets.verdict(row(60, ours, theirs)) == reported


def test_a_budget_that_only_a_peer_meets_is_lost() -> None:
    assert budgets.verdict(row(33, None, 40.0)) == "lost"
    assert budgets.verdict(row(33, None, None)) == "none fits"


def test_the_better_of_two_peers_counts() -> None:
    both = row(60, 10.0, 20.0) | {"activation_memory_budget": {"met": True, "added_percent": 5.0}}
    assert budgets.verdict(both) == "slower"


def test_totals_count_rows_that_lose() -> None:
    rows = row(66, 3.0, 10.0, monet=4.0), row(60, 12.0, 8.0, monet=5.0), row(33, None, 40.0)
    totals = budgets.summary([result(*rows)])
    assert totals == {
        "budgets": 3,
        "met": 2,
        "exceeded": 0,
        "predicted_within_2_percent": 2,
        "ran": 2,
        "slower_than_the_better_peer": 2,
        "at_or_under_monet": 1,
        "compared_with_monet": 2,
    }
    assert budgets.summary_line(totals).startswith("2 of 3 budgets met, 0 exceeded")


def test_a_table_keeps_every_row_and_is_plain_text_where_it_is_piped() -> None:
    out = io.StringIO()
    Console(file=out, width=200, no_color=True).print(budgets.network_table(result(row(66, 3.0, 10.0), row(33, None))))
    text = out.getvalue()
    assert "2.00 s a step" in text and "9.0 %" in text
    assert "+10.0 % (4 segments)" in text and "infeasible" in text and "≥ 1.000 MiB" in text
    assert "\x1b" not in text


def test_the_paper_has_figures_for_its_own_networks_and_shares_only() -> None:
    assert [monet_overhead_percent("vgg16_bn", share) for share in SHARES] == [-5.3, -4.64, -2.18, 1.99, 5.44, 9.11]
    assert monet_overhead_percent("unet3d", 66) is None
    assert monet_overhead_percent("resnet50", 50) is None
    assert monet_overhead_percent("resnet50", 66.5) is None


def test_a_lower_budget_must_not_give_a_higher_peak() -> None:
    check_falling([(100, 95), (80, 80), (60, 41)])
    with pytest.raises(WrongResult):
        check_falling([(100, 70), (80, 75)])
    with pytest.raises(WrongResult):
        check_falling([(100, 101)])
