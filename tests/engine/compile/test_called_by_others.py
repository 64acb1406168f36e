"""A compiled model inside what other tools make of it: compiled functions, exports, copies, function transforms."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import CaptureError, InputError
from tests.engine.compile.compiled import ROOMY
from tests.engine.training_laws import costs_that_do_not_matter, images, mean_square, same_bits
from tests.raising import raising


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def planned_network() -> nn.Sequential:
    return shoal.compile(network(), budget=ROOMY)


BATCH = images(1, 2, 3, 8, 8)[0]


def assert_trains_like_plain(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> None:
    plain = network()
    mean_square(plain(BATCH)).backward()
    model.zero_grad()
    with costs_that_do_not_matter():
        mean_square(call(BATCH)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)


def compiled_function(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda x: model(x * 1) * 1, backend="aot_eager")


def compiled_parent(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(nn.Sequential(model, nn.Identity()), backend="aot_eager")


def compiled_in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    "outer",
    [lambda model: torch.compile(model, backend="aot_eager"), compiled_function, compiled_parent, compiled_in_place],
    ids=["model", "function", "parent", "in-place"],
)
def test_inside_another_compiled_function_a_step_keeps_its_budget(outer: Callable[[nn.Module], Any]) -> None:
    model = planned_network()
    call = outer(model)
    assert_trains_like_plain(call, model)
    assert_trains_like_plain(call, model)
    assert len(model.shoal.plans) == 1
    assert model.shoal.measured_peak_bytes is not None


def test_in_eval_mode_another_compiler_takes_the_model_whole() -> None:
    model = planned_network().eval()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same_bits(whole(BATCH), network().eval()(BATCH))


def test_a_part_with_a_budget_of_its_own_is_refused_by_name() -> None:
    model = network()
    shoal.compile(model[2], budget=ROOMY)
    with raising(InputError, "'2'"):
        shoal.compile(model, budget=ROOMY)
    assert_trains_like_plain(model, model)
    assert len(model[2].shoal.plans) == 1


def test_a_part_that_gets_a_budget_after_the_whole_is_refused_at_the_next_capture() -> None:
    model = planned_network()
    shoal.compile(model[0], budget=ROOMY)
    with costs_that_do_not_matter(), pytest.raises(CaptureError):
        model(BATCH)


def test_what_stands_for_a_model_is_refused() -> None:
    with raising(InputError, "torch.compile", "shoal.compile"):
        shoal.compile(torch.compile(network(), backend="eager"), budget=ROOMY)
    with raising(InputError, "DistributedDataParallel"):
        shoal.compile(nn.DataParallel(network()), budget=ROOMY)


def test_a_model_that_was_compiled_in_place_is_taken_over_aloud(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    model.compile(backend="aot_eager")
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.compile(model, budget=ROOMY)
    assert "shoal.compile replaces that" in caplog.text
    assert_trains_like_plain(model, model)
    assert len(model.shoal.plans) == 1


def test_exports_and_traces_are_of_the_plain_model() -> None:
    model = planned_network()
    expected = network()(BATCH)
    for program in (
        torch.export.export(model, (BATCH,)).module(),
        torch.jit.trace(model, BATCH, check_trace=False),
        torch.fx.symbolic_trace(model),
    ):
        assert same_bits(program(BATCH), expected)
    assert model.shoal.plans == ()
    assert_trains_like_plain(model, model)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, saved_and_loaded, lambda model: torch.optim.swa_utils.AveragedModel(model).module],
    ids=["deepcopy", "saved", "averaged"],
)
def test_a_copy_has_no_plan_and_says_so(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = planned_network()
    assert_trains_like_plain(model, model)
    twin = duplicate(model)
    assert twin.shoal is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # were the twin to call the original, this would be seen
    assert_trains_like_plain(twin, twin)
    assert len(model.shoal.plans) == 1
    assert_trains_like_plain(shoal.compile(twin, budget=ROOMY), twin)
    assert len(twin.shoal.plans) == 1
    assert duplicate(twin).shoal is None


@pytest.mark.parametrize(
    "transformed",
    [
        lambda model: torch.func.grad(lambda x: model(x).sum())(BATCH),
        lambda model: torch.func.vmap(model)(BATCH[None]),
        lambda model: torch.func.jvp(model, (BATCH,), (BATCH,)),
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_function_transforms_are_refused(transformed: Callable[[nn.Module], Any]) -> None:
    with raising(CaptureError, "torch.func"):
        transformed(planned_network())


def test_forward_mode_is_refused() -> None:
    with torch.autograd.forward_ad.dual_level(), pytest.raises(CaptureError):
        planned_network()(torch.autograd.forward_ad.make_dual(BATCH, BATCH))


def penalty(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = BATCH.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mean_square(call(x)), x, create_graph=True)
    mean_square(gradient).backward()


def test_gradients_of_gradients_are_refused_and_what_the_refusal_advises_works() -> None:
    plain, model = network(), planned_network()
    with costs_that_do_not_matter():
        for call in (model, torch.compile(network(), backend="shoal")):
            with raising(CaptureError, "model.forward"):
                penalty(call)
    penalty(model.forward)
    penalty(plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or same_bits(ours.grad, theirs.grad)
    assert_trains_like_plain(model, model)
