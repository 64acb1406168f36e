"""Arguments that make no sense are reported before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.app.training.options import TrainOptions
from shoal.errors import InputError


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"planner": "best"},
            "no planner is called 'best'; there are joint, chain, keep_all, and MODULE:FUNCTION",
        ),
        ({"optimizer": "lion"}, "unknown optimizer 'lion': give one of sgd, adamw"),
        ({"amp": "fp8"}, "unknown amp 'fp8'"),
        ({"kernels": "jit"}, "unknown kernels 'jit'"),
        ({"batch": 0}, "batch=0: it must be at least 1"),
        ({"epochs": 0}, "epochs=0: it must be at least 1"),
        ({"workers": -1}, "workers=-1: it must be at least 0"),
        ({"image": 0}, "image=0: it must be at least 1"),
        ({"seed": -1}, "seed=-1: it must be at least 0"),
        ({"seed": 2**64}, "seed=18446744073709551616: it must be at most 2**63 - 1"),
        ({"seed": 10**30}, "seed=1000000000000000000000000000000: it must be"),
        ({"workers": 2**31}, "workers=2147483648: give at most"),
        ({"lr": float("nan")}, "lr=nan: it must be a finite number"),
        ({"momentum": -0.1}, "momentum=-0.1: it must be a finite number"),
        ({"budget_bytes": None}, "no budget was given"),
        ({"budget_bytes": None, "planner": "none", "enforce": True}, "no budget was given"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainOptions(**{"budget_bytes": 10**8, **wrong})
    assert str(caught.value).startswith(told)


def test_plain_pytorch_needs_no_budget() -> None:
    assert TrainOptions(planner="none").budget_bytes is None


def test_what_changes_no_number_may_differ_between_a_run_and_its_continuation() -> None:
    run = TrainOptions(budget_bytes=10**8)
    again = TrainOptions(planner="none", workers=2, out=Path("elsewhere"), resume=True)
    assert run.deciding() == again.deciding()
    assert run.deciding() != TrainOptions(budget_bytes=10**8, seed=1).deciding()


def test_where_encoding_is_permitted_the_budget_decides_what_is_encoded_and_so_the_numbers() -> None:
    run = TrainOptions(budget_bytes=10**8, allow="bitwise, encode")
    assert run.deciding() != TrainOptions(budget_bytes=10**7, allow="bitwise, encode").deciding()
    assert run.deciding() != TrainOptions(budget_bytes=10**8).deciding()
    assert run.deciding() == TrainOptions(budget_bytes=10**8, allow="bitwise, encode", workers=2).deciding()
