"""Graphs that Inductor compiles one by one, and what it takes from its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from shoal.lowlevel.inductor_region import compile_each, in_primitive_ops, wide_sums
from tests.engine.training_laws import needs_compiler

aten = torch.ops.aten

REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: (x.sum(),),
    "sum over axes": lambda x: (x.sum((0, 2)), x.sum(1, keepdim=True)),
    "mean": lambda x: (x.mean(), x.mean((0, 2), keepdim=True)),
    "var_mean": lambda x: torch.var_mean(x, (0, 2), correction=0) + torch.var_mean(x, (0, 1, 2), keepdim=True),
    "var": lambda x: (x.var((0, 2), correction=1), x.var((0, 2), correction=2.5, keepdim=True)),
    "batch norm": lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[1:],
}


@needs_compiler
def test_code_for_a_processor_with_longer_vectors_is_not_taken_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch 2.13 keys its cache by the graph only: AVX-512's loops, compiled for AVX2, skip every second half."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.linspace(0, 1, 400).view(4, 100)

    def hits(capability: str) -> int:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)  # Inductor reads it whenever it writes code
        counters.clear()
        (run,) = compile_each([in_primitive_ops(lambda y: (torch.softmax(y.sin() + 1, -1),), [x])])
        assert not isinstance(run, Exception)
        torch.testing.assert_close(run([x])[0], torch.softmax(x.sin() + 1, -1))
        return counters["inductor"]["fxgraph_cache_hit"]

    assert [hits("default"), hits("default")] == [0, 1]
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert hits(torch.backends.cpu.get_cpu_capability().lower()) == 0


def values(channels_last: bool = False) -> torch.Tensor:
    """Numbers of which float32 loses much when it adds them one by one."""
    x = 100 + torch.randn(8, 6, 1200, generator=torch.Generator().manual_seed(0))
    return x.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else x


def sums_of(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[torch.dtype]:
    """The dtype of each sum that Inductor is given."""
    module, _ = in_primitive_ops(function, [x])
    sums = [node for node in module.graph.nodes if node.target in (aten.sum.default, aten.sum.dim_IntList)]
    return [node.meta["val"].dtype for node in sums]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_long_reduction_is_that_of_float64_rounded_once(name: str, channels_last: bool) -> None:
    x, function = values(channels_last), REDUCTIONS[name]
    module, _ = in_primitive_ops(function, [x])
    assert torch.float64 in {node.meta["val"].dtype for node in module.graph.nodes if "val" in node.meta}
    for found, exact in zip(module(x), function(x.double()), strict=True):
        assert found.dtype is torch.float32 and found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=2e-7, atol=0)


def test_bfloat16_is_added_in_float64_too_and_rounded_to_what_was_asked_for() -> None:
    x = values().bfloat16()
    module, _ = in_primitive_ops(lambda x: (x.sum((0, 2)), x.sum((0, 2), dtype=torch.float32)), [x])
    narrow, wide = module(x)
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(narrow, x.double().sum((0, 2)).bfloat16()) and torch.equal(wide, x.double().sum((0, 2)).float())


def test_a_sum_in_few_additions_one_after_another_stays() -> None:
    assert sums_of(lambda x: (x.sum(-1),), torch.empty(4, 1024)) == [torch.float32]
    assert sums_of(lambda x: (x.sum(-1),), torch.empty(4, 1025)) == [torch.float64]
    assert sums_of(lambda x: (x.sum(0),), torch.empty(64, 8)) == [torch.float32]  # not of neighbours: one chain each
    assert sums_of(lambda x: (x.sum(0),), torch.empty(65, 8)) == [torch.float64]


def test_integers_and_float64_stay() -> None:
    assert sums_of(lambda x: (x.sum(),), torch.ones(5000, dtype=torch.int64)) == [torch.int64]
    assert sums_of(lambda x: (x.sum(),), torch.ones(5000, dtype=torch.bool)) == [torch.int64]
    assert sums_of(lambda x: (x.sum(),), torch.ones(5000, dtype=torch.float64)) == [torch.float64]


def test_what_has_no_deviation_gives_0_and_too_great_a_correction_infinity() -> None:
    module, _ = in_primitive_ops(lambda x: (x.var((0, 2)), x[:, 0].var(correction=9600)), [values()])
    x = values()
    assert torch.equal(module(torch.full_like(x, 1e5 / 3))[0], torch.zeros(6))
    assert bool(torch.isinf(module(x)[1]))  # as in eager PyTorch


def test_on_cuda_nothing_is_replaced() -> None:
    assert wide_sums("cuda") == {}
