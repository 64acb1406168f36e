"""The report is what a training step does, layer by layer, and leaves the model as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.engine.lossy_report import LossyReport
from shoal.errors import InputError
from tests.engine.lossy_steps import chain, plan_encoding_everything
from tests.engine.training_laws import images, same_bits

LABELS = torch.tensor([0, 1, 2, 3])


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, LABELS)


def report_of(model: nn.Module, **how: Any) -> LossyReport:
    return shoal.compile(model).shoal.lossy_report(images(1, 4, 3, 16, 16)[0], **{"loss": loss, **how})


def test_each_convolution_behind_the_first_has_its_error() -> None:
    model = chain(3, 8, 8, 12)
    report = report_of(model, options=shoal.Options(codec_block=512))
    assert [layer.parameter for layer in report.layers] == ["2.weight", "4.weight"]
    assert report.same_outputs
    assert set(report.differing) == {"2.weight", "4.weight"}
    for layer in report.layers:
        assert 0 < layer.relative_error < 0.05 and 0 < layer.activation_error < 0.05
        assert 0.999 < layer.cosine <= 1.0
        assert layer.exact_bytes == 4 * 4 * 8 * 16 * 16
        assert layer.encoded_bytes == layer.exact_bytes // 4 + 4 * (layer.exact_bytes // 4 // 512)
    assert report.largest_error == max(layer.relative_error for layer in report.layers)
    assert "2.weight" in report.explain() and "dynamic_tree in blocks of 512" in report.explain()
    assert json.loads(json.dumps(report.to_json()))["layers"][0]["parameter"] == "2.weight"


def test_the_errors_are_those_of_a_step_under_such_a_plan() -> None:
    model, batch = chain(3, 8, 8, 12), images(1, 4, 3, 16, 16)[0]
    plan = plan_encoding_everything(model, batch, "linear")
    report = report_of(model, plan=plan)
    exact, lossy = (
        copy.deepcopy(model),
        shoal.compile(copy.deepcopy(model), offload_to=None, options=shoal.Options(plan=plan)),
    )
    for one in (exact, lossy):
        loss(one(batch)).backward()
    off = (lossy[4].weight.grad - exact[4].weight.grad).norm() / exact[4].weight.grad.norm()
    assert report.layers[1].relative_error == pytest.approx(float(off), rel=1e-5)


def test_fewer_values_a_scale_err_less_and_chance_errs_more() -> None:
    model = chain(3, 8, 8, 12)
    whole, blocks, drawn = (
        report_of(model, options=shoal.Options(codec="linear", **how)).layers[0].activation_error
        for how in ({"codec_block": None}, {"codec_block": 64}, {"codec_block": 64, "codec_seed": 1})
    )
    assert blocks < whole and blocks < drawn


def test_the_model_stays_as_it_is() -> None:
    model = nn.Sequential(*chain(3, 8, 8), nn.Dropout(0.5))
    model.insert(1, nn.BatchNorm2d(8))
    model.eval()
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = report_of(model)
    assert report.same_outputs and report.differing == ("3.weight",)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_where_nothing_may_be_encoded_there_is_nothing_to_report() -> None:
    report = report_of(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    assert report.layers == report.differing == () and report.largest_error == 0 and report.same_outputs


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: report_of(chain(3, 4, 5), options="one_bit"), InputError),
        (lambda: report_of(chain(3, 4, 5), plan=shoal.plan(chain(3, 4, 5), torch.ones(2, 3, 8, 8))), InputError),
    ],
)
def test_what_cannot_be_reported_is_refused(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
