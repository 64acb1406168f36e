"""Contenders of the benchmark of compiled regions: what they compute in, and how far from a reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.compiled_contenders import errors_of, in_precision


def test_errors_are_of_all_parameters_and_of_each() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0]), "none": torch.zeros(2)}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([12.0]), "none": torch.zeros(2)}
    assert errors_of(found, reference) == pytest.approx({"error": 0.5 / 13, "median_error": 0.05, "largest_error": 0.1})


def test_autocast_is_of_the_models_call_alone() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    assert in_precision(linear, "bfloat16")(x).dtype is torch.bfloat16
    assert in_precision(linear, "float32")(x).dtype is torch.float32
