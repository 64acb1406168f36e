"""A frontier as plain data: where the user stands, what a point adds, and how it is saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.variant import WHOLE
from shoal.report.frontiers import COLUMNS, rows
from tests.report.made_up_frontier import made_up_frontier


@pytest.mark.parametrize(("budget_bytes", "place"), [(None, None), (399, None), (400, 0), (999, 2), (5000, 3)])
def test_the_user_stands_at_the_fastest_point_that_fits(budget_bytes: int | None, place: int | None) -> None:
    frontier = replace(made_up_frontier(), budget_bytes=budget_bytes)
    assert frontier.inside_budget == (None if place is None else frontier.points[place])


def test_what_a_point_adds_is_a_share_of_the_plain_step() -> None:
    frontier = made_up_frontier()
    assert [round(frontier.added_share(point), 9) for point in frontier.points] == [0.5, 0.25, 0.1, -0.1]


def test_the_smallest_budget_in_which_a_step_takes_twice_as_long_at_most_is_usable() -> None:
    frontier = made_up_frontier()
    assert frontier.usable == frontier.points[0]
    slow = [replace(point, seconds=2.1 * frontier.plain_seconds) for point in frontier.points]
    assert replace(frontier, points=(*slow[:2], *frontier.points[2:])).usable == frontier.points[2]
    assert replace(frontier, points=tuple(slow)).usable is None


def test_its_json_says_everything(tmp_path: Path) -> None:
    frontier = made_up_frontier()
    read = json.loads(frontier.save(tmp_path / "frontier.json").read_text())
    assert [point["budget_bytes"] for point in read["points"]] == [400, 600, 800, 1000]
    assert read["points"][0]["recomputed"] == {"count": 2, "nbytes": 300}
    assert read["points"][-1]["variant"]["fuse"] == "bnff"
    assert read["plain_peak_bytes"] == 1000 and read["budget_bytes"] == 700
    assert read["means"] == ["fuse", "recompute"]


def test_a_row_of_the_table_says_what_its_point_uses() -> None:
    first = dict(zip(COLUMNS, rows(made_up_frontier())[0], strict=True))
    assert first["budget"] == "400 B" and first["of plain %"] == "40.0" and first["added"] == "+50.0 %"
    assert (first["kept"], first["recomputed"], first["encoded"]) == ("1: 100 B", "2: 300 B", "-")
    assert first["computed"] == str(WHOLE)
