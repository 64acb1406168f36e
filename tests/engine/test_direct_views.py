"""Views made by one call each have the values, sizes, strides and storage of the ops that they are in place of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.engine.direct_views import with_direct_views
from shoal.lowlevel.torch_state import new_view

aten = torch.ops.aten
STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda x: x.transpose(0, -1),
    "longer": lambda x: x.unsqueeze(1),
    "shorter": lambda x: x.squeeze(),
    "wider": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "second piece": lambda x: x.split(2, dim=-1)[-1],
    "one of all": lambda x: x.unbind(0)[-1],
    "every other": lambda x: x[..., ::2],
    "rows": lambda x: x.select(0, 0),
    "as it is": lambda x: x.detach(),
    "flat": lambda x: x.contiguous().view(-1),
    "counted": lambda x: x + 1,
    "permuted": lambda x: x.permute(*reversed(range(x.dim()))),
}


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    mode = FakeTensorMode()
    with mode:
        module = make_fx(function, tracing_mode="real")(*(mode.from_tensor(x) for x in inputs))
    return module


def views_of(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8), st.sampled_from([0, 5]))
def test_a_chain_of_views_is_one_with_the_same_elements(names: list[str], offset: int) -> None:
    x = torch.arange(200.0)[offset : offset + 120].view(4, 5, 6)

    def chained(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        for name in names:
            y = STEPS[name](y) if y.dim() else y + 1
        return y.sin()

    module = traced(chained, x)
    direct = with_direct_views(module)
    expected, found = module(x), direct(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    kept = {aten.view.default, aten.transpose.int, aten.split.Tensor, aten.unbind.int, aten.permute.default}
    assert not kept & set(views_of(direct))


def test_views_of_one_result_are_made_from_it_and_what_led_to_them_is_gone() -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, keys = (x + 1).view(2, 4, 6).split(3, dim=2)
        return queries.transpose(1, 2).exp(), keys.exp()

    module = traced(parts, torch.randn(8, 6))
    direct = with_direct_views(module)
    assert views_of(direct) == [aten.add.Tensor, new_view, new_view, aten.exp.default, aten.exp.default]
    x = torch.randn(8, 6)
    for one, other in zip(direct(x), module(x), strict=True):
        assert torch.equal(one, other)


def test_a_graph_without_views_is_left_alone() -> None:
    module = traced(lambda x: x.exp() + 1, torch.randn(3))
    assert with_direct_views(module) is module


def test_a_view_of_a_copy_that_was_put_in_later_begins_where_the_copy_does() -> None:
    module = traced(lambda x: (x + 1).split(2)[1].view(6).exp(), torch.randn(4, 3))
    (view,) = module.graph.find_nodes(op="call_function", target=aten.view.default)
    (cut,) = view.all_input_nodes
    with module.graph.inserting_before(view):
        copy = module.graph.call_function(aten.clone.default, (cut,))
    copy.meta["val"] = cut.meta["val"].clone()
    view.replace_input_with(cut, copy)
    module.recompile()
    direct = with_direct_views(module)
    assert [node.args[3] for node in direct.graph.nodes if node.target is new_view] == [6, 0]
    x = torch.randn(4, 3)
    assert torch.equal(direct(x), module(x))


def test_an_input_that_lies_elsewhere_in_its_storage_is_read_where_it_lies() -> None:
    direct = with_direct_views(traced(lambda x: x.view(2, 2).t().exp(), torch.randn(4)))
    whole = torch.randn(9)
    assert torch.equal(direct(whole[5:]), whole[5:].view(2, 2).t().exp())


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.view(2, 2), id="returned"),
        pytest.param(lambda x: (x.view(2, 2).t(), x.view(2, 2).exp())[0], id="its own view is returned"),
        pytest.param(lambda x: x.view(2, 2).t().mul_(2).exp(), id="written through"),
    ],
)
def test_a_view_of_an_input_that_somebody_may_write_to_counts_its_versions(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    direct = with_direct_views(traced(function, torch.randn(4)))
    x = torch.randn(4)
    before = x._version
    result = direct(x)
    if result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        result.add_(1)
    assert x._version > before


def test_a_storage_dies_after_the_same_op() -> None:
    alive: list[bool] = []
    storages: list[Any] = []

    def held(module: fx.GraphModule) -> list[bool]:
        alive.clear()

        class Watch(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                if n.target is aten.mul.Tensor:
                    storages[:] = [torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage())]
                if n.target in (aten.exp.default, aten.sin.default, aten.cos.default):
                    alive.append(not storages[0].expired())
                return value

        Watch(module).run(torch.ones(4, 4))
        return list(alive)

    def read_twice(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).view(2, 8)
        first = y.t().exp()
        return first.sum() + y.view(16).sin().sum().cos()

    module = traced(read_twice, torch.ones(4, 4))
    assert held(with_direct_views(module)) == held(module)
