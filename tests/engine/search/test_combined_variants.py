"""A step with norms fused or inverted in some layers and others on slices, slabs or patches: the same function, and the
search finds it where it is the fastest."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import shoal
from bench.techniques import BATCH, HARDWARE, PIXELS, network
from shoal.capture.layered import Refused
from shoal.core.means import LOSSY
from shoal.core.plan import Plan
from shoal.core.variant import WHOLE, Variant
from shoal.engine.iteration.variants import IterationVariants
from shoal.engine.search import best_variant, split_variants
from shoal.engine.search.combinations import in_parts, norms_of_the_rest
from shoal.engine.search.variants import Variants
from tests.engine.search.variant_steps import captured, step
from tests.random_steps import conv_bn_relu_chain

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
SIZES = {1: (24,), 2: (16, 12), 3: (10, 8, 8)}


class Network(nn.Module):
    """Batch norms and instance norms in layers that are cut and in layers that are not, and a residual in each."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        convolution, norm, by_sample = (kinds[dims - 1] for kinds in (CONVOLUTIONS, BATCH_NORMS, INSTANCE_NORMS))
        self.first = convolution(3, 6, 3, padding=1)
        self.convolutions = nn.ModuleList(convolution(6, 6, 3, padding=1) for _ in range(7))
        self.norms = nn.ModuleList(norm(6) for _ in range(6))
        self.by_sample = nn.ModuleList(by_sample(6, affine=True) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for place in range(2):
            one, two, three = self.norms[3 * place : 3 * place + 3]
            convolutions = self.convolutions[3 * place : 3 * place + 3]
            x = F.leaky_relu(self.by_sample[place](x), 0.1)
            before = x = F.relu(one(convolutions[0](x)))
            x = F.relu(two(convolutions[1](x)))
            x = F.relu(three(convolutions[2](x)) + before)
        return self.head(self.convolutions[6](x).flatten(2).mean(2))


def combinations(dims: int) -> Iterator[Variant]:
    norms = [Variant(fuse=level) for level in ("mvf", "bnff", "icf")]
    norms += [Variant(invert=True), Variant(fuse="bnff", invert=True)]
    parts = [Variant(depth=0.5, slices=2), Variant(depth=0.5, slices=5), Variant(depth=0.5, grid=(2,) * dims)]
    parts += [Variant(slabs=2), Variant(slabs=3, twice=True)] if dims == 3 else []
    return (part.with_norms(norm) for part in parts for norm in norms)


def called(graph: fx.GraphModule) -> set[str]:
    """What the layers of a variant's graph call, by the names of functions and of classes of modules."""
    (variant,) = (module for module in graph.children() if hasattr(module, "_rewritten"))
    (rewritten,) = variant._rewritten
    names = {node.target.__name__ for node in rewritten.graph.nodes if node.op == "call_function"}
    modules = (rewritten.get_submodule(node.target) for node in rewritten.graph.find_nodes(op="call_module"))
    return names | {type(module).__name__ for module in modules if type(module).__module__.startswith("shoal")}


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_combination_computes_the_model(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_variants, "_WORTH_SLABS_BYTES", 0)
    torch.manual_seed(0)
    model, x = Network(dims).double(), torch.randn(5, 3, *SIZES[dims], dtype=torch.float64)
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    expected = step(lambda: plain(x), plain)
    graph, inputs = captured(model, x)
    variants = Variants(graph, LOSSY)
    for variant in combinations(dims):
        model.load_state_dict(before)
        try:
            rewritten = variants.graph(variant)
        except Refused:  # every batch norm is cut
            assert variant.slabs and variant.fuse
            continue
        has = called(rewritten)
        if variant.slices:
            assert {"narrow", "sliced_batch_norm"} <= has, variant
        assert ("inverted_norm_in" in has) == variant.invert, variant
        assert variant.fuse in ("", "rcf") or "Normalise" in has or "Affine" in has, variant
        found = step(lambda rewritten=rewritten: rewritten(*inputs)[0], model)  # type: ignore[misc]
        assert found.keys() == expected.keys()
        for name, theirs in expected.items():
            torch.testing.assert_close(found[name], theirs, rtol=1e-9, atol=1e-9, msg=f"{variant}: {name}")


def test_a_combination_says_both_and_needs_both_to_be_allowed() -> None:
    both = Variant(depth=0.125, slices=4).with_norms(Variant(fuse="bnff"))
    assert str(both) == "batch norm fused (bnff), 12.5 % of the convolutions on 4 slices of the batch"
    assert both.means == {"fuse", "exact_split"}
    assert both.norms == Variant(fuse="bnff") and both.parts == Variant(depth=0.125, slices=4)


PLAIN_PEAK_BYTES = 9_157_664  # of `bench.techniques`' network with everything kept


@cache
def planned(budget_share: float, allow: str) -> Plan:
    with torch.device("meta"):
        model, x = network(), torch.empty(BATCH, 3, PIXELS, PIXELS)
    budget_bytes = int(budget_share * PLAIN_PEAK_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_variants, "_PARTS", ())  # patches take long to plan
        return shoal.plan(model, x, budget_bytes, hardware=HARDWARE, offload_to=None, allow=f"recompute, {allow}")


@pytest.mark.slow
def test_where_the_first_layers_need_too_much_they_run_on_slices_and_the_norms_of_the_others_are_fused() -> None:
    both, on_slices = planned(0.4, "fuse, exact_split"), planned(0.4, "exact_split")
    assert both.variant.slices and both.variant.fuse
    assert both.predicted_seconds < on_slices.predicted_seconds
    assert both.predicted_peak_bytes <= both.budget_bytes
    assert both.predicted_seconds < 1.9 * both.plain_timeline.seconds  # 2.95 with 75 % cut
    with pytest.raises(shoal.BudgetError):
        planned(0.4, "fuse")


@pytest.mark.slow
def test_as_few_layers_are_cut_as_the_budget_allows() -> None:
    depths = [planned(share, "exact_split").variant.depth for share in (0.4, 0.3)]
    assert 0 < depths[0] < depths[1] < 0.75


@pytest.mark.slow
def test_more_techniques_are_never_slower_where_fused_norms_need_more_bytes() -> None:
    """At this budget the layers that are cut leave no room for the others with norms fused."""
    both, on_slices = planned(0.3, "fuse, exact_split"), planned(0.3, "exact_split")
    assert both.predicted_seconds <= on_slices.predicted_seconds


@pytest.mark.slow
def test_a_combination_trains_inside_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether fused norms are faster on this machine is not what is tested: they are taken to be."""
    monkeypatch.setattr(best_variant, "norms_of_the_rest", lambda candidates: (Variant(fuse="bnff"), False))
    monkeypatch.setattr(split_variants, "_PARTS", ())  # patches take long to plan
    torch.manual_seed(0)
    # In float64, for in float32 rounding may change the sign of an activation, in plain PyTorch too.
    model, x = network().double(), torch.randn(8, 3, 48, 48, dtype=torch.float64)
    plain = copy.deepcopy(model)
    budget_bytes = int(0.3 * shoal.plan(model, x).plain_peak_bytes)
    ours: Any = shoal.compile(model, budget=budget_bytes, allow="recompute, fuse, exact_split")
    mine, theirs = step(lambda: ours(x), model), step(lambda: plain(x), plain)
    assert ours.shoal.plan.variant.slices and ours.shoal.plan.variant.fuse
    assert ours.shoal.measured_peak_bytes <= budget_bytes
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-9, msg=name)


def costs(seconds: float, held_bytes: int) -> Any:
    graph = conv_bn_relu_chain(3)
    total = graph.plain_seconds
    ops = tuple(replace(op, seconds=op.seconds * seconds / total) for op in graph.ops)
    return replace(graph, ops=ops, static_bytes=held_bytes)


def test_norms_of_the_rest_are_fused_if_that_is_faster_and_inverted_if_that_needs_less() -> None:
    whole, fused, inverted = WHOLE, Variant(fuse="bnff"), Variant(invert=True)
    found = norms_of_the_rest([(whole, costs(1.0, 100)), (fused, costs(0.9, 100)), (inverted, costs(1.1, 50))])
    assert found == (Variant(fuse="bnff", invert=True), False)
    assert norms_of_the_rest([(whole, costs(1.0, 100)), (fused, costs(0.9, 150))]) == (fused, True)
    assert norms_of_the_rest([(whole, costs(1.0, 100)), (fused, costs(1.1, 50)), (inverted, costs(1.0, 100))]) == (
        whole,
        False,
    )


def test_parts_come_with_norms_as_they_are_too_only_if_these_need_more_bytes() -> None:
    graph, _ = captured(network(), torch.randn(4, 3, 24, 24))
    variants, fused = Variants(graph, frozenset({"fuse", "exact_split"})), Variant(fuse="bnff")
    alone, less = ({*in_parts(variants, fused, needs_more=more)} for more in (True, False))
    assert all(one.fuse for one in less)
    assert {one.parts for one in alone if one.slices} == {one for one in alone if one.slices and not one.fuse}
    assert not any(one.fuse for one in alone if one.grid)


def test_graphs_of_an_iteration_that_cannot_be_cut_have_their_norms_fused() -> None:
    class Graph:
        def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
            self.variants = Variants(captured(model, x)[0], frozenset({"fuse", "exact_split"}))

    one = Graph(network(), torch.randn(4, 3, 24, 24))
    flat = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    other = Graph(flat, torch.randn(1, 3, 8, 8))  # one sample: no slices
    both = IterationVariants([one, other])  # type: ignore[list-item]
    sliced = next(variant for variant in both.split() if variant.slices)
    changed = both.graph(sliced.with_norms(Variant(fuse="bnff")))
    assert [(own.slices, own.fuse) for _, own in changed.values()] == [(sliced.slices, "bnff"), (0, "bnff")]
    depths = [own.depth for less in both.of_fewer_layers(sliced) for _, own in both.graph(less).values()]
    assert depths == [sliced.depth / 2, sliced.depth / 4]
