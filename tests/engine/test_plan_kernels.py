"""A plan is refused where the kernels are missing with which it was made, by their name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.core.variant import Pieces, Variant
from shoal.engine import plan_kernels
from shoal.engine.plan_kernels import check_kernels, kernels_of
from shoal.errors import PlanError
from shoal.lowlevel import dispatch, native
from tests.engine.training_laws import blocks
from tests.raising import raising
from tests.random_steps import conv_bn_relu_chain

needs_native = pytest.mark.skipif(native.library() is None, reason="the native library was not built")


def fusing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*blocks(3, 16, 16), nn.Flatten())


def planned(variant: Variant) -> shoal.Plan:
    plan = shoal.Plan(conv_bn_relu_chain(2), {}, "joint", variant=variant)
    return dataclasses.replace(plan, kernels=kernels_of(plan, "cpu"))


@needs_native
def test_it_knows_by_which_kernels_it_fuses_or_computes_directly() -> None:
    direct = Variant(pieces=(Pieces("conv", direct=True),))
    found = [planned(variant).kernels for variant in (Variant(fuse="bnff"), direct, Variant(), Variant(depth=0.5))]
    assert found == [("native",), ("native",), (), ()]


@needs_native
def test_without_the_library_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(Variant(fuse="bnff"))
    check_kernels(plan, "cpu")
    monkeypatch.setattr(dispatch, "library", lambda: None)
    with raising(PlanError, "'fuse'"):
        check_kernels(plan, "cpu")
    made_there = planned(Variant(fuse="bnff"))
    assert not made_there.kernels
    check_kernels(made_there, "cpu")  # planned with PyTorch's own ops, and runs so


def test_without_a_compiler_its_regions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    step = conv_bn_relu_chain(2)
    first, *others = step.ops
    region = dataclasses.replace(first, target="shoal.compiled_region.region_0f")
    plan = shoal.Plan(dataclasses.replace(step, ops=(region, *others)), {}, "joint")
    monkeypatch.setattr(plan_kernels, "missing_compiler", lambda device_type: "no C++ compiler is found")
    with raising(PlanError, "(kernels='compiled')"):
        check_kernels(plan, "cpu")


@needs_native
def test_a_saved_plan_is_refused_where_the_references_alone_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shoal.compile(fusing(), budget="1GiB", allow="fuse, recompute")
    batch = torch.zeros(4, 3, 32, 32)
    model(batch).sum().backward()
    plan = model.shoal.plan
    assert plan.variant.fuse and plan.kernels == ("native",)
    path = plan.save(tmp_path / "plan.json")
    with monkeypatch.context() as patch, pytest.raises(PlanError) as refused:
        patch.setenv(dispatch.VARIABLE, "reference")
        shoal.compile(fusing(), options=shoal.Options(plan=shoal.Plan.load(path)))(batch).sum().backward()
    assert all(name in str(refused.value) for name in ("'fuse'", "native", "SHOAL_KERNELS"))
    again = shoal.compile(fusing(), options=shoal.Options(plan=shoal.Plan.load(path)))
    again(batch).sum().backward()
    assert again.shoal.plan.kernels == ("native",)
