"""What a model is compiled with is read in one place, whatever it is written as, and goes with the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.lossy import LossyOptions
from shoal.core.means import BITWISE
from shoal.core.presets import get as preset
from shoal.engine.compile_options import CompileOptions, OffloadOptions
from shoal.engine.options import KERNELS, Options
from shoal.errors import InputError, ShoalError
from shoal.memory.optimizer_state import NamedOptimizer
from tests.engine.keywords import keywords
from tests.engine.training_laws import keep_nothing
from tests.raising import raising

WRITTEN: dict[str, Any] = {
    "budget": "2GiB",
    "host_budget": "1GiB",
    "offload_to": "host",
    "allow": "bitwise, encode",
    "codec": "linear",
    "codec_block": 64,
}
MEANT = CompileOptions(
    2**31, offload=OffloadOptions("host", 2**30), lossy=LossyOptions("linear", 64), means=BITWISE | {"encode"}
)


def test_texts_and_objects_mean_the_same() -> None:
    assert CompileOptions.of(**keywords(WRITTEN)) == MEANT
    given = WRITTEN | {"budget": 2**31, "host_budget": 2**30, "allow": [*BITWISE, "encode"]}
    assert CompileOptions.of(**keywords(given)) == MEANT
    assert CompileOptions.of(budget=1, offload_to=Path("/tmp")).offload.to == "/tmp"
    assert CompileOptions.of(budget=1, options=Options(rehearse="p100-nvlink")).offload.rehearse == preset(
        "p100-nvlink"
    )


def test_the_mapping_of_a_backend_means_the_same_as_keywords() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert CompileOptions.of_backend(WRITTEN) == (MEANT, None)
    assert CompileOptions.of_backend({**WRITTEN, "optimizer": optimizer}) == (MEANT, optimizer)
    assert CompileOptions.of_backend({**WRITTEN, "optimizer": "SGD"}) == (MEANT, NamedOptimizer("sgd"))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"budget": "much"}, ""),
        ({"planner": "chaim"}, "'chain'"),
        ({"planner": 3}, ""),
        ({"kernels": "jit"}, "kernels='jit'"),
        ({"rehearse": "p100-nvlink", "offload_to": None, "budget": 1}, "offload_to=None"),
        ({"host_budget": 1, "offload_to": None, "budget": 1}, "offload_to=None"),
        ({"planner": "chain"}, "'chain'"),
        ({"planner": keep_nothing}, "keep_nothing"),
        ({"offload_to": "host"}, "offload_to='host'"),
        ({"rehearse": "p100-nvlink"}, "budget="),
        ({"rehearse": "p1000"}, ""),
        ({"rehearse": 3}, ""),
        ({"codec": "linear"}, "allow='exact"),
        ({"codec": "linear", "budget": 1, "allow": "exact"}, "allow='exact"),
        ({"allow": "encode", "budget": 1, "planner": "chain"}, "planner='joint'"),
        ({"codec": "fp16", "budget": 1}, ""),
        ({"plan": "plan.json"}, "plan=shoal.Plan.load"),
        ({"kernel": "eager"}, "shoal.Options"),
        ({"quick": True}, "shoal.Options"),
        ({"options": {"planner": "chain"}}, "options=shoal.Options(planner='chain')"),
        ({"options": "chain"}, "options=shoal.Options"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(given: dict[str, Any], complaint: str) -> None:
    with raising(ShoalError, complaint):
        CompileOptions.of(**keywords(given))


def test_a_place_to_offload_to_names_offload_as_allow_does() -> None:
    assert CompileOptions.of(budget=1).named == CompileOptions.of(budget=1, offload_to=None).named == frozenset()
    assert CompileOptions.of(budget=1, offload_to="host", options=Options(host_budget=2)).named == {"offload"}


@pytest.mark.parametrize("where", [8, ["host"], b"host"])
def test_a_place_to_offload_to_is_a_text_or_a_path(where: Any) -> None:
    with raising(InputError, "offload_to", type(where).__name__, "'host'"):
        CompileOptions.of(budget=1, offload_to=where)


@pytest.mark.parametrize("name", [3, ["mine"], torch.ones(2)])
def test_a_name_is_a_text(name: Any) -> None:
    net = nn.Conv2d(3, 4, 3)
    for made in (
        lambda: shoal.compile(net, budget="1GiB", name=name),
        lambda: shoal.compile(net, budget=shoal.Budget("1GiB"), name=name),
        lambda: shoal.plan(net, torch.ones(1, 3, 8, 8), hardware="p100-nvlink", name=name),
    ):
        with raising(InputError, "name", type(name).__name__, "'Conv2d'"):
            made()
    assert shoal.compile(net, budget="1GiB", name="mine") is net  # what was refused has not changed it


def test_with_a_plan_no_budget_is_needed() -> None:
    plan = shoal.plan(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8))
    assert CompileOptions.of(offload_to="host", options=Options(plan=plan)).offload.to == "host"
    for wrong in ({"budget_of": "reserved"}, {"planner": "chain"}, {"codec": "linear"}):
        with pytest.raises(InputError):
            CompileOptions.of(budget=1, options=Options(plan=plan, **wrong))
    assert CompileOptions.of(options=Options(planner="keep_all")) == CompileOptions(planner="keep_all")


def test_what_a_backend_does_not_know_is_refused() -> None:
    with raising(InputError, "options=", "'shoal'", "'offload'", "'offload_to'"):
        CompileOptions.of_backend({"offload": "host"})
    with pytest.raises(InputError):
        CompileOptions.of_backend({}, "max-autotune")
    with raising(InputError, "torch.optim.Optimizer"):
        CompileOptions.of_backend({"optimizer": {"lr": 0.1}})


def test_a_link_is_rehearsed_on_the_cpu_alone() -> None:
    with pytest.raises(InputError):
        CompileOptions.of(budget=1, options=Options(rehearse="p100-nvlink")).offloading("cuda")


def test_regions_are_compiled_on_cuda_unless_asked_for() -> None:
    found = {name: [CompileOptions(kernels=name).compiles(type) for type in ("cpu", "cuda")] for name in KERNELS}
    assert found == {"auto": [False, True], "eager": [False, False], "compiled": [True, True]}


def test_a_plan_says_what_it_was_made_with(tmp_path: Path) -> None:
    net, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8)
    planned = shoal.plan(net, images, "1GiB", hardware="p100-nvlink")
    assert shoal.Plan.load(planned.save(tmp_path / "plan.json")).options == CompileOptions.of(budget="1GiB").to_json()
    shoal.compile(net, "1GiB", offload_to=None, options=shoal.Options(planner="chain"))(images).sum().backward()
    assert (
        net.shoal.plan.options
        == CompileOptions.of(budget="1GiB", offload_to=None, options=Options(planner="chain")).to_json()
    )


def test_pieces_are_for_the_planner_that_chooses() -> None:
    assert "pieces" in CompileOptions.of(budget=1, allow="bitwise").variant_means
    assert "pieces" not in CompileOptions.of(budget=1, allow="recompute").variant_means
    assert "pieces" not in CompileOptions.of(budget=1, allow="bitwise", options=Options(planner="chain")).variant_means
