"""What counts as the same training: equal bits, or, where plain PyTorch does not repeat itself, the float64 rule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bench.frame import WrongResult
from bench.reference import take_reference
from bench.workload import Workload
from tests.raising import raising


def workload() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 5)
    ).train()
    return Workload("tiny", model, torch.randn(2, 3, 8, 8), torch.randint(5, (2,)), seed=3)


def test_a_plain_step_repeats_itself_bit_for_bit() -> None:
    step = workload()
    reference = take_reference(step, step.shared_copy())
    assert reference.repeatable
    assert reference.check(step.shared_copy(), "a twin") == "equal bits"


def test_a_changed_gradient_a_statistic_moved_twice_and_another_random_number_are_wrong() -> None:
    step = workload()
    reference = take_reference(step, step.shared_copy())
    with raising(WrongResult, "PyTorch", "0.weight"):
        reference.check(lambda x: step.model(x) * 0.5, "halves")

    def moved_twice(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            step.model[1](step.model[0](x))
        return step.model(x)

    with raising(WrongResult, "1.running_mean", "1.running_var"):
        reference.check(moved_twice, "moved twice")
    with pytest.raises(WrongResult):
        reference.check(lambda x: step.model(x) + 0 * torch.rand(1), "another draw")


def test_what_pytorchs_own_capture_computes_otherwise_is_told_and_nothing_else_passes() -> None:
    step = workload()
    reference = take_reference(step, step.shared_copy())
    # As on hosts where the gradient of a layer is summed in another order after a copy of AOTAutograd's.
    reference.gradients["4.bias"] = reference.gradients["4.bias"] * (1 + 1e-7)
    captured = torch.compile(step.shared_copy(), backend="aot_eager")
    assert reference.check(captured, "captured") == "bits of aot_eager"
    with raising(WrongResult, "PyTorch", "0.weight"):
        reference.check(lambda x: step.model(x) * (1 + 1e-6), "another")


def test_an_unrepeatable_device_is_held_to_the_float64_rule() -> None:
    step = workload()
    reference = take_reference(step, step.shared_copy())
    reference.repeatable = False
    assert reference.check(lambda x: step.model(x) * (1 + 1e-7), "near") == "float64 rule"
    with pytest.raises(WrongResult):
        reference.check(lambda x: step.model(x) * (1 + 1e-3), "far")


def test_the_float64_step_drops_what_the_float32_step_drops() -> None:
    step = workload()
    reference = take_reference(step, step.shared_copy())
    exact = reference._float64.gradients
    for name, gradient in reference.gradients.items():
        assert torch.allclose(gradient.double(), exact[name], rtol=1e-3, atol=1e-5), name
    assert copy.deepcopy(step.model)[2].p == 0.3


def test_statistics_may_be_nearer_to_float64_than_plain_pytorchs_and_not_further_off() -> None:
    step = workload()
    reference = take_reference(step, step.shared_copy())

    def nearly(x: torch.Tensor) -> torch.Tensor:
        return step.model(x) * (1 + 1e-7)

    # As of a long map in channels_last, which PyTorch sums in order.
    reference.buffers["1.running_var"] = reference.buffers["1.running_var"] + 0.01
    assert reference.check_function(nearly, "exact") == "same function"
    reference.buffers["1.running_var"] -= 0.01
    with torch.no_grad():
        reference.initial_buffers["1.running_var"] += 0.05
    with raising(WrongResult, "1.running_var"):
        reference.check_function(nearly, "moved from elsewhere")


def test_a_running_mean_of_zero_may_differ_by_a_rounding_of_the_spread_and_by_no_more() -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(6 * 36, 5)).train()
    step = Workload("tiny", model, torch.randn(2, 3, 8, 8), torch.randint(5, (2,)), seed=3)
    reference = take_reference(step, step.shared_copy())
    assert reference.buffers["3.running_mean"].abs().max() < 1e-6

    def shifted(by: float) -> str:
        def forward(x: torch.Tensor) -> torch.Tensor:
            x = model[3](model[2](model[1](model[0](x))) + by)
            return model[5](model[4](x))

        return reference.check_function(forward, "shifted")

    assert shifted(1e-6) == "same function"
    with raising(WrongResult, "3.running_mean"):
        shifted(0.1)
