"""A step told from two others is the step that would have been captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.capture.capture_step import capture_step
from shoal.capture.step_writer import shrunk
from shoal.core.step import StepGraph
from shoal.engine.search.scaled_step import scaled_step
from tests.engine.training_laws import blocks
from tests.random_steps import conv_bn_relu_chain, steps


def captured(net: nn.Module, batch: int, *, small: bool = False) -> StepGraph:
    step = capture_step(net, torch.empty(batch, 3, 8, 8, device="meta"), name="net", runs_here=False)[0]
    return ((shrunk(step) or step) if small else step).graph


@pytest.mark.slow
def test_a_scaled_step_is_the_captured_one() -> None:
    with torch.device("meta"):
        layers = [*blocks(3, 8, 8), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten()]
        net = nn.Sequential(*layers, nn.Linear(4 * 2 * 2, 10))
    small, large = captured(net, 4), captured(net, 16)
    assert scaled_step(small, 4, large, 16, 4) == small
    for batch in (7, 50):
        assert scaled_step(small, 4, large, 16, batch) == captured(net, batch)


def test_steps_of_two_variants_are_told_apart() -> None:
    """Shrunk, a ReLU of a large result has a mask of its own."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 4, 3))
    small, large = (captured(net, batch, small=True) for batch in (4, 256))
    assert len(small.ops) != len(large.ops)
    assert scaled_step(small, 4, large, 256, 100) is None


def times(graph: StepGraph, images: int) -> StepGraph:
    """A step of `images` images made of one of a single image, with parameters that stay."""
    ops = [
        replace(op, flops=7 + 3 * images, moved_bytes=5 * images, signature=f"conv(f32[{images},3],{2 * images})")
        for op in graph.ops
    ]
    storages = [
        replace(s, nbytes=s.nbytes if s.kind == "parameter" else images * s.nbytes, shape=(images, s.nbytes))
        for s in graph.storages
    ]
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


@given(steps(), st.integers(1, 50), st.integers(1, 50), st.integers(1, 100))
def test_what_grows_with_the_images_is_told_for_any_batch(graph: StepGraph, one: int, more: int, batch: int) -> None:
    other = one + more
    assert scaled_step(times(graph, one), one, times(graph, other), other, batch) == times(graph, batch)


def test_counts_that_would_not_be_whole_are_no_answer() -> None:
    graph = conv_bn_relu_chain(2)
    rounded = replace(graph, storages=tuple(replace(s, nbytes=s.nbytes + 512) for s in graph.storages))
    assert scaled_step(graph, 4, rounded, 16, 10) == replace(
        graph, storages=tuple(replace(s, nbytes=s.nbytes + 256) for s in graph.storages)
    )
    assert scaled_step(graph, 4, rounded, 16, 5) is None


@pytest.mark.parametrize("change", [{"layer": "elsewhere"}, {"recomputable": False}, {"reads": ()}])
def test_ops_that_differ_in_more_than_counts_are_another_variant(change: dict[str, object]) -> None:
    graph = conv_bn_relu_chain(2)
    changed = replace(graph, ops=(replace(graph.ops[0], **change), *graph.ops[1:]))
    assert scaled_step(graph, 4, changed, 16, 10) is None
    assert scaled_step(graph, 4, graph, 16, 10) == graph
