"""Means that are allowed by name and do not apply to a step: one line each, logged and in the plan."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from tests.engine.training_laws import blocks

PRESET = "p100-nvlink"


def plain_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*blocks(3, 8), nn.Flatten())


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = plain_layers(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.getMessage() in found)
    return [line.partition("allow: ")[2] for line in found]


@pytest.mark.parametrize(
    ("means", "reason"),
    [
        ("fuse", "there is no batch norm"),
        ("exact_split", "there is no convolution of images"),
        ("split", "there is no convolution of images"),
        ("encode", "there is no convolution, whose inputs it is for"),
        ("offload", "device and host are one"),
        ("invert", "no norm can be inverted: there is no instance or group norm"),
        ("pieces", "there is no op whose scratch is large enough"),
        ("direct", "there is no convolution of volumes"),
    ],
)
def test_a_means_that_a_step_has_no_use_for_is_named(means: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = shoal.plan(plain_layers(), torch.randn(8, 16), "1MiB", allow=["recompute", means])
    (said,) = lines(caplog)
    assert said.startswith(f"{means!r} is without effect: {reason}")
    assert plan.without_effect == (said,) and f"allowed         {said}" in plan.explain()


def test_a_set_of_means_names_none_of_them(caplog: pytest.LogCaptureFixture) -> None:
    for allow in ("bitwise", "exact", "lossy"):
        shoal.plan(plain_layers(), torch.randn(8, 16), "1MiB", allow=allow)
    assert not lines(caplog)


def test_what_applies_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    images = torch.empty(2, 3, 16, 16, device="meta")
    net = normalised().to("meta")
    shoal.plan(net, images, "1MiB", allow="recompute, order, offload, fuse, exact_split, encode", hardware=PRESET)
    assert not lines(caplog)


def test_another_planner_looks_for_no_order_and_another_machine_for_no_pieces(caplog: pytest.LogCaptureFixture) -> None:
    step = plain_layers(), torch.randn(8, 16), "1MiB"
    shoal.plan(*step, allow="recompute, order", options=shoal.Options(planner="chain"))
    shoal.plan(*step, hardware=PRESET, allow="recompute, pieces, direct")
    assert [said.partition(":")[0] for said in lines(caplog)] == [
        "'order' is without effect",
        "'direct' is without effect",
        "'pieces' is without effect",
    ]


def test_on_another_machine_large_norms_may_be_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        net, volumes = nn.Sequential(nn.Conv3d(1, 16, 1), nn.GroupNorm(4, 16)), torch.empty(1, 1, 48, 48, 48)
    shoal.plan(net, volumes, "1GiB", hardware=PRESET, allow="recompute, pieces")
    assert not lines(caplog)


def test_a_compiled_model_says_it_once_and_its_plan_too(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = shoal.compile(plain_layers(), "1MiB", allow="fuse, recompute")
    for batch in (8, 8):
        model(torch.randn(batch, 16)).sum().backward()
    assert lines(caplog) == ["'fuse' is without effect: there is no batch norm"]
    saved = shoal.Plan.load(model.shoal.plan.save(tmp_path / "plan.json"))
    assert list(saved.without_effect) == lines(caplog)


def test_several_graphs_say_it_too_when_they_are_planned(caplog: pytest.LogCaptureFixture) -> None:
    model = shoal.compile(Breaking(), "1MiB", allow="fuse, order, recompute")
    for _ in range(2):
        model(torch.randn(8, 16)).sum().backward()
    shared = shoal.compile(plain_layers(), shoal.Budget("1MiB"), allow="encode, offload, recompute")
    for _ in range(3):  # the first that adds to gradients is measured by itself
        shared(torch.randn(8, 16)).sum().backward()
    assert lines(caplog) == [
        "'fuse' is without effect: there is no batch norm",
        "'encode' is without effect: there is no convolution, whose inputs it is for",
        "'offload' is without effect: device and host are one; offload_to= may name a folder",
    ]


def test_a_planner_of_several_graphs_may_offload_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = shoal.compile(Breaking(), "1MiB", offload_to="host", options=shoal.Options(planner="chain"))
    model(torch.randn(8, 16)).sum().backward()
    said = "'offload' is without effect: the planner 'chain' offloads nothing"
    assert lines(caplog) == [said]
    assert model.shoal.plan.without_effect == (said,)
    assert said in str(model.shoal) and said in model.shoal.plan.explain()


def test_a_keyword_names_offload_and_a_planner_may_have_no_use_for_it(caplog: pytest.LogCaptureFixture) -> None:
    step = plain_layers(), torch.randn(8, 16), "1MiB"
    assert shoal.plan(*step, offload_to="host").without_effect == ()
    for planner in ("chain", "keep_all"):
        assert len(shoal.plan(*step, offload_to="host", options=shoal.Options(planner=planner)).without_effect) == 1
    assert len(lines(caplog)) == 2


def test_fit_says_it(caplog: pytest.LogCaptureFixture) -> None:
    net = plain_layers().to("meta")
    how = {"hardware": PRESET, "allow": "recompute, fuse", "max_batch": 4}
    found = shoal.fit(net, lambda batch: torch.empty(batch, 16, device="meta"), "1MiB", **how)
    assert list(found.plan.without_effect) == lines(caplog) == ["'fuse' is without effect: there is no batch norm"]


def test_batch_norms_that_an_inversion_by_hand_left_plain_are_fused(caplog: pytest.LogCaptureFixture) -> None:
    """The updates of running statistics in a transform's own ops do not keep the layers from being read."""
    torch.manual_seed(0)
    inverted = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1)]
    net = nn.Sequential(*blocks(8, 8, 8), *inverted, nn.AdaptiveAvgPool2d(1))
    images = torch.randn(4, 8, 16, 16)
    reference, plain, tried, planned = (shoal.invert_norm(copy.deepcopy(net), slope=None) for _ in range(4))
    budget_bytes = shoal.plan(plain, images).predicted_peak_bytes * 9 // 10
    shoal.compile(tried, budget_bytes, allow="recompute, fuse")(images).sum().backward()
    (fused,) = (one.variant for one in tried.shoal.plan.candidates if one.variant.fuse)
    assert not lines(caplog)
    shoal.compile(planned, "1MiB", allow="recompute, fuse")
    planned.shoal.variants.update(dict.fromkeys(tried.shoal.variants, fused))  # as an earlier run had it
    for model, given in ((reference.double(), images.double()), (plain, images), (planned, images)):
        model(given).square().sum().backward()
    assert planned.shoal.plan.variant == fused
    exact = [*(p.grad for p in reference.parameters()), *reference.buffers()]
    error_of = {
        model: max(
            (a.double() - b.double()).abs().max().item()
            for a, b in zip([*(p.grad for p in model.parameters()), *model.buffers()], exact, strict=True)
        )
        for model in (plain, planned)
    }
    assert error_of[planned] <= error_of[plain] + 1e-5 * max(a.abs().max().item() for a in exact)


def test_a_frontier_says_it(caplog: pytest.LogCaptureFixture) -> None:
    net, batch = plain_layers().to("meta"), torch.empty(8, 16, device="meta")
    shoal.frontier(net, batch, hardware=PRESET, allow="recompute, split", points=2)
    assert lines(caplog) == ["'split' is without effect: there is no convolution of images"]
