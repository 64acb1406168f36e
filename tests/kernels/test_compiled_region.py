"""A region compiled by Inductor gives the same in every run, whether it writes over an operand or not."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from shoal.kernels.compiled_region import CompiledRegion, compile_regions, region_of
from tests.engine.training_laws import needs_compiler, same_bits


def scaled(x: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
    y = torch.relu(x * weight.view(1, -1, 1, 1) + 1)
    return y, y.sum((0, 2, 3))


def channel_first(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return (x.transpose(0, 1).contiguous() + x,)


def made(function: Any, *inputs: torch.Tensor) -> CompiledRegion:
    described = [f"{tuple(x.shape)} {x.stride()}" for x in inputs]
    return region_of(function, function(*inputs)[0], inputs, "words", f"{function.__qualname__} {described}")


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kernels.compiled_region._known", {})


@needs_compiler
def test_a_region_computes_its_function_also_over_an_operand() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last), torch.rand(8)
    region = made(scaled, x, weight)
    compile_regions([region])
    assert region.failure == "" and region.overwritable == (0,)
    expected = scaled(x.double(), weight.double())
    results = region(x, weight)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert results[0].stride() == x.stride()
    over = x.clone()
    again = region(over, weight, over=over)
    assert again[0] is over
    assert all(map(same_bits, again, results))


@needs_compiler
def test_where_nothing_may_be_written_over_each_result_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a block that is handed in for a result that is read again would be a copy of it."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last), torch.rand(8)
    written_over = made(scaled, x, weight)
    monkeypatch.setattr("shoal.kernels.compiled_region._OVERWRITES_ON", ())
    monkeypatch.setattr("shoal.kernels.compiled_region._known", {})
    region = made(scaled, x, weight)
    graphs = [one.traced() for one in (written_over, region)]
    copies = [
        len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)) for module, _ in graphs
    ]
    assert copies == [1, 0] and [len(inputs) for _, inputs in graphs] == [3, 2]
    compile_regions([region])
    assert region.failure == "" and region.overwritable == ()
    results = region(x, weight)
    for ours, theirs in zip(results, scaled(x.double(), weight.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert results[0].stride() == x.stride()


def masked(x: torch.Tensor, mask: torch.Tensor) -> Sequence[torch.Tensor]:
    y = torch.where(mask, x, 0.0)
    return y, y > 0.5, y.sum((0, 2, 3))


def mask_first(x: torch.Tensor, mask: torch.Tensor) -> Sequence[torch.Tensor]:
    return mask & (x > 0), x * mask


@needs_compiler
@pytest.mark.parametrize("function", [masked, mask_first])
@pytest.mark.parametrize("channels_last", [False, True])
def test_masks_go_in_and_out_as_bytes_and_are_booleans_outside(function: Any, channels_last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 9, 9)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    mask = x > -0.3
    region = made(function, x, mask)
    _, given = region.traced()
    assert [one.dtype for one in given if one.dtype is not torch.float32] == [torch.uint8] * (
        1 + (function is mask_first)
    )
    compile_regions([region])
    assert region.failure == ""
    for ours, theirs in zip(region(x, mask), function(x, mask), strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs)
    if function is mask_first:
        over = mask.clone()
        assert region.overwritable == (1,)
        assert region(x, over, over=over)[0] is over and torch.equal(over, mask & (x > 0))


def test_a_result_that_needs_the_whole_operand_is_not_written_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(graphs: Sequence[Any]) -> list[Any]:
        def run(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            first, x = arguments
            for row in range(len(x)):  # as a compiled loop would, row by row
                first[row].copy_(x[:, row] + x[row])
            return ()

        return [run for _ in graphs]

    monkeypatch.setattr("shoal.kernels.compiled_region.compile_each", each)
    region = made(channel_first, torch.randn(5, 5))
    compile_regions([region])
    assert region.failure == "" and region.overwritable == ()


@needs_compiler
def test_what_another_process_compiled_is_found_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, weight = torch.randn(2, 8, 9, 9), torch.rand(8)
    found = []
    for _ in range(2):
        monkeypatch.setattr("shoal.kernels.compiled_region._known", {})  # as a new process starts
        counters.clear()
        region = made(scaled, x, weight)
        compile_regions([region])
        found.append((counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]))
        assert region.failure == "" and region.is_compiled
    assert found == [(1, 0), (0, 1)]


def test_regions_of_one_content_are_one() -> None:
    x, weight = torch.randn(2, 8, 4, 4), torch.rand(8)
    assert made(scaled, x, weight) is made(scaled, x.clone(), weight)
    assert made(scaled, x, weight) is not made(scaled, x.to(memory_format=torch.channels_last), weight)
    region = made(scaled, x, weight)
    assert copy.deepcopy(region) is region


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        (lambda first, x: (x,), "shares memory"),
        (lambda first, x: (x.double(),), "another layout"),
    ],
)
def test_a_result_that_is_not_as_traced_is_a_failure(run: Any, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kernels.compiled_region.compile_each", lambda graphs: [lambda given: run(*given)])
    region = made(lambda x: (x + 1, x + 2), torch.randn(4, 4))
    compile_regions([region])
    assert failure in region.failure


def test_what_the_compiler_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kernels.compiled_region.compile_each", lambda graphs: [ValueError("no such op\nmore")])
    region = made(scaled, torch.randn(2, 8, 4, 4), torch.rand(8))
    compile_regions([region])
    assert region.failure == "no such op"
