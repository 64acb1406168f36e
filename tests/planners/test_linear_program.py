"""Solving small programs: whole or relaxed, within limits, whatever else runs HiGHS in the process."""

from __future__ import annotations

import math
from typing import Any

import highspy
import pytest

from shoal.planners.linear_program import LinearProgram

LIMITS: dict[str, Any] = {"gap": 0.0, "max_nodes": 1000, "max_simplex_iterations": 1000, "time_limit_seconds": 60.0}


def knapsack() -> LinearProgram:
    """Give up as little value as possible such that at least 5 of 9 units of weight go."""
    program = LinearProgram()
    values, weights = (6.0, 5.0, 4.0), (4.0, 3.0, 2.0)
    columns = [program.variable(value, binary=True) for value in values]
    program.at_least(5.0, dict(zip(columns, weights, strict=True)))
    return program


def test_whole_values_cost_at_least_what_parts_do() -> None:
    whole = knapsack().run(**LIMITS)
    assert whole.values is not None
    assert [round(value) for value in whole.values] == [0, 1, 1]
    assert whole.cost == pytest.approx(9.0) and whole.cost_bound == pytest.approx(9.0)
    parts = knapsack().run(whole=False, **LIMITS)
    assert parts.cost == pytest.approx(6.0 + 5.0 / 3)
    assert not whole.timed_out and not parts.timed_out


def test_what_has_no_solution_costs_infinitely_much() -> None:
    program = knapsack()
    program.at_least(10.0, {0: 1.0})
    found = program.run(**LIMITS)
    assert found.values is None and found.cost == math.inf and found.cost_bound == math.inf


def test_without_time_it_says_so() -> None:
    assert knapsack().run(**{**LIMITS, "time_limit_seconds": 0.0}).timed_out


def test_it_runs_where_others_have_started_highs_with_more_threads() -> None:
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.addBinary(obj=-1)
    other.run()
    assert knapsack().run(**LIMITS).cost == pytest.approx(9.0)
