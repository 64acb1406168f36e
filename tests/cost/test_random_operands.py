"""Operands for one op: exact layouts, values the op can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.cost.random_operands import OperandFactory

aten = torch.ops.aten


def arguments_of(function: Callable[..., Any], *operands: torch.Tensor) -> list[Any]:
    """What the first op of `function` would be called with."""
    graph = make_fx(function, tracing_mode="fake")(*operands).graph
    node = next(node for node in graph.nodes if node.op == "call_function")
    return list(OperandFactory(torch.device("cpu")).arguments(node)[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4, 5, 6),
        lambda: torch.zeros(3, 4, 5, 6).to(memory_format=torch.channels_last),
        lambda: torch.zeros(3, 4, 10, 6)[:, :, ::2],
        lambda: torch.zeros(3, 1).expand(3, 7),
        lambda: torch.zeros(0, 3),
        lambda: torch.zeros(()),
        lambda: torch.zeros(2, 3, dtype=torch.bfloat16),
        lambda: torch.zeros(2, 3, dtype=torch.int64),
        lambda: torch.zeros(64, 64, dtype=torch.bool),
        lambda: torch.zeros(2, 3, dtype=torch.complex64).mH,
        lambda: torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
        lambda: torch._neg_view(torch.zeros(2, 3, dtype=torch.complex64).conj()),
    ],
)
def test_operands_have_the_captured_size_stride_dtype_and_lazy_bits(make):
    x = make()
    graph = fx.Graph()
    operand = graph.placeholder("x")
    operand.meta["val"] = FakeTensorMode().from_tensor(x)
    (made,), _ = OperandFactory(torch.device("cpu")).arguments(graph.call_function(aten.clone.default, (operand,)))
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
    assert (made.is_conj(), made.is_neg()) == (x.is_conj(), x.is_neg())


def test_operands_hold_what_ops_can_take():
    (floats,) = arguments_of(lambda a: aten.clone(a), torch.zeros(1500, 1000))
    assert float(floats.std()) == pytest.approx(1, abs=0.05)
    assert torch.equal(floats, arguments_of(lambda a: aten.clone(a), torch.zeros(1500, 1000))[0])
    (variances,) = arguments_of(lambda a: aten.rsqrt(a), torch.zeros(100))
    assert float(variances.min()) >= 0.5
    (truth,) = arguments_of(lambda a: aten.logical_not(a), torch.zeros(64, 64, dtype=torch.bool))
    assert 0.3 < float(truth.double().mean()) < 0.7
    scores, classes, *_ = arguments_of(
        lambda a, t: aten.nll_loss_forward(a, t, None, 1, -100), torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64)
    )
    assert scores.shape == (9, 4)
    assert set(classes.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("draw", [aten.bernoulli, aten.poisson, lambda x: aten.normal(x, x)])
def test_random_ops_are_given_what_they_can_draw_from(draw):
    draw(*arguments_of(draw, torch.zeros(8, 8))[:1])


@pytest.mark.parametrize(
    ("shape", "pool"),
    [
        ((2, 3, 9, 8), lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])),
        ((2, 3, 8, 8), lambda x: aten.max_pool2d_with_indices(x, [2, 2])),
        ((1, 2, 6, 6, 8), lambda x: aten.max_pool3d_with_indices(x, [2, 2, 2], [2, 2, 2])),
    ],
)
def test_pool_indices_are_those_of_falling_values(shape, pool):
    traced = make_fx(lambda x: pool(x)[1] + 0, tracing_mode="fake")(torch.zeros(shape))
    node = next(node for node in traced.graph.nodes if node.target is aten.add.Tensor)
    (indices, _), _ = OperandFactory(torch.device("cpu")).arguments(node)
    falling = -torch.arange(float(torch.Size(shape).numel())).view(shape)
    assert torch.equal(indices, pool(falling)[1])


@pytest.mark.parametrize(
    ("indexed", "others"),
    [
        (lambda y, mask, i, v: aten.index_put(y, [mask, i], v), [torch.zeros(50, dtype=torch.int64), torch.zeros(())]),
        (lambda y, mask, v: aten.index_put(y, [mask], v, True), [torch.zeros(50, 8)]),
    ],
)
def test_a_mask_selects_as_many_places_as_the_other_operands_are_for(indexed, others):
    y, mask = torch.zeros(4, 16, 8), torch.zeros(4, 16, dtype=torch.bool)
    _, found, *_ = arguments_of(indexed, y, mask, *others)
    assert found[0].sum() == 50


def test_operands_of_another_librarys_op_are_zeros_for_it_may_take_floats_for_places():
    """As torchvision's `roi_align` does, whose gradient writes wherever the first column of its boxes says."""
    with torch.library._scoped_library("elsewhere", "FRAGMENT") as library:
        library.define("pooled(Tensor image, Tensor boxes) -> Tensor")
        library.impl("pooled", lambda image, boxes: image.clone(), "CompositeExplicitAutograd")
        operands = torch.ones(2, 3, 4, 4), torch.ones(7, 5)
        found = arguments_of(lambda image, boxes: torch.ops.elsewhere.pooled(image, boxes), *operands)
    assert [tuple(x.shape) for x in found] == [(2, 3, 4, 4), (7, 5)]
    assert not any(x.any() for x in found)


def test_an_operand_named_twice_is_one_tensor():
    left, right = arguments_of(lambda x: x * x, torch.randn(4))
    assert left is right


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_what_is_asserted_holds(dtype):
    graph = fx.Graph()
    operand = graph.placeholder("x")
    operand.meta["val"] = FakeTensorMode().from_tensor(torch.zeros((), dtype=dtype))
    node = graph.call_function(aten._assert_async.msg, (operand, "it does not hold"))
    args, _ = OperandFactory(torch.device("cpu")).arguments(node)
    aten._assert_async.msg(*args)
    assert bool(args[0])


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_are_not_empty(mode):
    """The scratch for the rows of an empty bag is none."""
    table, indices, offsets = torch.zeros(5, 4), torch.zeros(12, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    given = arguments_of(lambda *args: aten._embedding_bag(*args, False, mode), table, indices, offsets)
    assert set(given[1].tolist()) == set(range(5)) and given[2].tolist() == [0, 4, 8]

    results = aten._embedding_bag(table, indices, offsets, False, mode)
    back = arguments_of(
        lambda *args: aten._embedding_bag_backward(*args, 5, False, mode, False, None),
        results[0],
        indices,
        offsets,
        *results[1:],
    )
    assert set(back[1].tolist()) == set(range(5)) and back[4].tolist() == [1] * len(results[2])
    aten._embedding_bag_backward(*back)
