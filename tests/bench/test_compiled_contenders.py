"""Contenders of the benchmark of compiled regions: what they compute in, and how far from a reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.compiled_contenders import EAGER, INDUCTOR, Contenders, errors_of, in_precision
from bench.frame import WrongResult
from bench.workload import Workload
from tests.engine.training_laws import needs_compiler


def test_errors_are_of_all_parameters_and_of_each() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0]), "none": torch.zeros(2)}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([12.0]), "none": torch.zeros(2)}
    assert errors_of(found, reference) == pytest.approx({"error": 0.5 / 13, "median_error": 0.05, "largest_error": 0.1})


def test_autocast_is_of_the_models_call_alone() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    assert in_precision(linear, "bfloat16")(x).dtype is torch.bfloat16
    assert in_precision(linear, "float32")(x).dtype is torch.float32


def drawing() -> Workload:
    """A network whose masks `torch.compile` draws otherwise than eager PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    return Workload("drawing", model, torch.randn(16, 8), torch.randint(4, (16,)))


@needs_compiler
def test_torch_compile_is_held_against_eager_on_the_same_masks() -> None:
    contenders = Contenders(drawing(), "float32")
    contenders.add_inductor(INDUCTOR, None)
    row = contenders.rows[INDUCTOR]
    assert row["error"] < 1e-6
    assert list(contenders.forwards) == [EAGER, INDUCTOR]


def test_gradients_of_ours_that_are_too_far_off_end_the_benchmark() -> None:
    contenders = Contenders(drawing(), "float32")
    with pytest.raises(WrongResult):
        contenders.add_ours("shoal", lambda x: 2 * contenders.workload.model(x) - contenders.workload.model(x).detach())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_float64_draws_the_masks_of_each_precision(precision: str) -> None:
    off = Contenders(drawing(), precision).rows[EAGER]["error"]
    assert 0 < off < (1e-6 if precision == "float32" else 0.02)
