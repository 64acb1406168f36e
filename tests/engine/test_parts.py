"""Models that are several graphs: the same training as plain PyTorch."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import shoal
from shoal.core.step import StepGraph
from shoal.errors import CaptureError
from tests.engine.several_graphs import Chain, Looping, breaks, computes_eagerly, mean_square, prints
from tests.engine.training_laws import assert_same_training, costs_that_do_not_matter, differences, images, train


class Tied(Chain):
    """Two graphs with the same weights."""

    n_stages = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.then(self.stages[0](x))
        x = self.then(self.stages[1](x))
        x = self.then(self.stages[1](x))
        return self.head(self.stages[2](x).mean((2, 3)))


class Skipping(Chain):
    """What one graph makes is read by all later ones, and returned."""

    n_stages = 3

    def forward(self, x: torch.Tensor) -> Any:
        first = self.then(self.stages[0](x))
        second = self.then(self.stages[1](first))
        third = self.then(self.stages[2](first + second))
        return {"classes": self.head((first + third).mean((2, 3))), "first": first}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm = nn.Conv1d(3, 8, 3, padding=1), nn.LSTM(8, 8, batch_first=True)
        self.after = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x.flatten(2)).sigmoid()
        torch._dynamo.graph_break()
        y, _ = self.lstm(y.transpose(1, 2))
        torch._dynamo.graph_break()
        return self.after(y.transpose(1, 2))


class Heads(Chain):
    """Two layers of one class, with numbers of their own that divide a size: Dynamo makes them a symbol."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = [ByGroups(groups)(self.then(stage(x))) for stage, groups in zip(self.stages, (2, 4), strict=False)]
        return self.head(torch.cat(grouped, 1).mean((2, 3)))


class ByGroups(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, _, height, width = x.shape
        return x.view(n, -1, self.groups, height, width).transpose(1, 2).reshape(n, -1, height, width) ** 2


class Normalized(Chain):
    """A function with a number that PyTorch takes as a constant only, called with the same one twice."""

    n_stages = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, eps in zip(self.stages, (0.1, 0.2, 0.2), strict=True):
            x = normalized(stage(x), eps)
            self.between(x)
        return self.head(breaks_within(x).mean((2, 3)))


def normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.group_norm(x, 2, eps=eps)


def breaks_within(x: torch.Tensor) -> torch.Tensor:
    x = x.exp()
    torch._dynamo.graph_break()
    return x.sin()


def scales_by_its_mean(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + x.mean().item())


def branches(x: torch.Tensor) -> torch.Tensor:
    return 2 * x if x.sum() > 0 else 3 * x


@torch.compiler.disable  # type: ignore[untyped-decorator]
def changes_in_place(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).mul_(1.5)


def dropping(inputs: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, channels, 3, padding=1), nn.Dropout(0.3), nn.Sigmoid())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "branch": lambda: Chain(branches),
    "eager ops": lambda: Chain(computes_eagerly),
    "in place": lambda: Chain(changes_in_place),
    "loop": lambda: Looping(prints),
    "tied": lambda: Tied(breaks),
    "skip": lambda: Skipping(breaks),
    "dropout": lambda: Chain(breaks, [dropping(3, 4), dropping(4, 4)]),
    "lstm": Recurrent,
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_parts_of_a_model_train_as_plain_pytorch(network: str) -> None:
    planned = assert_same_training(NETWORKS[network](), images(3, 2, 3, 8, 8))
    assert planned.shoal.plan.breaks
    assert _parts(planned.shoal.plan.graph) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"batches_a_step": 2},
        {"backwards": 2},
        {"around_forward": lambda: torch.autocast("cpu", torch.bfloat16)},
    ],
    ids=["accumulation", "backward twice", "autocast"],
)
def test_they_do_in_every_loop(how: dict[str, Any]) -> None:
    assert_same_training(Chain(prints), images(4, 2, 3, 8, 8), **how)


@pytest.mark.slow
def test_a_last_short_batch_has_parts_of_its_own_and_a_plan_for_all_up_to_the_largest() -> None:
    planned = assert_same_training(
        Chain(breaks), [*images(2, 3, 3, 8, 8), *images(1, 2, 3, 8, 8), *images(1, 3, 3, 8, 8)]
    )
    assert [_batch(plan.graph) for plan in planned.shoal.plans] == [3, 3]


def test_a_number_that_changes_between_graphs_is_no_new_graph() -> None:
    """The mean is another number in every step."""
    assert_same_training(Chain(scales_by_its_mean), images(5, 2, 3, 8, 8))


def test_evaluation_runs_as_without_shoal() -> None:
    plain, planned = Chain(breaks), Chain(breaks)
    planned.load_state_dict(plain.state_dict())
    shoal.compile(planned, budget="1GiB")
    (x,) = images(1, 2, 3, 8, 8)
    assert torch.equal(plain.eval()(x), planned.eval()(x))
    assert not planned.shoal.plans


@pytest.mark.slow
def test_steps_that_go_different_ways_have_plans_of_their_own() -> None:
    class Choosing(Chain):
        n_stages = 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stages[0](x)
            if self.between(x):
                return self.head(self.stages[1](x).mean((2, 3)))
            return self.head(self.stages[2](x).mean((2, 3)))

    turns = iter([True, True, False, False, True, False, True, False] * 2)
    chosen = torch.compiler.disable(lambda x: next(turns))
    planned = assert_same_training(Choosing(chosen), images(8, 2, 3, 8, 8))
    assert len(planned.shoal.plans) == 2


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * torch.from_numpy(numpy.random.rand(4, 8) > 0.5))


def test_what_numpy_draws_comes_from_numpys_generator() -> None:
    model = Masking()
    models = model, shoal.compile(copy.deepcopy(model), budget="1MiB")
    for one in models:
        numpy.random.seed(0)
        one(torch.ones(4, 8)).square().mean().backward()
    plain, ours = ([parameter.grad for parameter in one.parameters()] for one in models)
    assert all(map(torch.equal, ours, plain))


def test_where_nothing_can_be_captured_nothing_is_promised() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(3, 4, 3)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x)

    with pytest.raises(CaptureError):
        shoal.compile(Opaque(), budget="1GiB")(*images(1, 2, 3, 8, 8))


class InALoop(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


class InAnObject(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(y=super().forward(x))


@pytest.mark.parametrize("kind", [InALoop, InAnObject])
def test_graphs_that_do_not_train_promise_nothing_for_a_step_that_does(kind: type[nn.Sequential]) -> None:
    model = kind(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3))
    seen: list[float] = []
    model[2].register_forward_hook(lambda _, __, y: seen.append(y.detach().mean().item()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError):
        shoal.compile(model, budget="1GiB")(*images(1, 2, 3, 12, 12))
    assert not differences(model.state_dict(), before)


def test_where_it_breaks_is_said_once_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    model = shoal.compile(Chain(prints), budget="1GiB")
    with caplog.at_level(logging.WARNING, "shoal"), costs_that_do_not_matter():
        train(model, images(3, 2, 3, 8, 8))
    (said,) = [record.getMessage() for record in caplog.records if "is not one graph" in record.getMessage()]
    assert "several_graphs.py" in said
    explained = model.shoal.plan.explain()
    assert "eager code between them" in explained
    assert "several_graphs.py" in explained


def test_nothing_of_a_batch_is_kept_and_the_model_is_freed_with_its_last_reference() -> None:
    model = shoal.compile(Looping(prints), budget="1GiB")
    with costs_that_do_not_matter():
        for (x,) in (images(1, 2, 3, 8, 8), images(1, 2, 3, 8, 8)):
            F.relu(model(x)).sum().backward()
    held = x.untyped_storage()
    reference = StorageWeakRef(held)
    del x, held
    gc.collect()
    assert reference.expired()
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


class ByImage(Chain):
    """Dynamo gives the loop up, in whose midst it is, with what that was called with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.each({"maps": self.stages[0](x)}).mean((2, 3)))

    def each(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        self.between(given["maps"])
        return torch.stack([self.stages[1](one[None])[0] if one.max() > -9 else one for one in given["maps"]])


def test_what_functions_were_given_while_they_were_captured_goes_with_the_step() -> None:
    """Without waiting for Python to look for cycles: it exists in addition to what the backward pass needs."""
    held: list[StorageWeakRef] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(x: torch.Tensor) -> None:
        held.append(StorageWeakRef(x.untyped_storage()))

    model, (x,) = shoal.compile(ByImage(note), budget="1GiB"), images(1, 2, 3, 8, 8)
    gc.collect()
    gc.disable()
    try:
        with costs_that_do_not_matter():
            mean_square(model, x)
        assert held and all(storage.expired() for storage in held)
    finally:
        gc.enable()


def test_a_function_whose_number_is_a_constant_to_pytorch_is_a_graph_for_each_and_not_left_to_eager_code() -> None:
    planned = assert_same_training(Normalized(breaks), images(3, 2, 3, 8, 8))
    ops = [op.target for op in planned.shoal.plan.graph.ops if op.phase == "forward"]
    assert sum("group_norm" in op for op in ops) == 3


def test_a_number_of_a_layer_that_shapes_its_tensors_is_a_number_in_each_graph() -> None:
    """As the classes of a detector's two heads."""
    stages = [nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)]
    planned = assert_same_training(Heads(breaks, stages, channels=8), images(3, 2, 3, 8, 8))
    assert _parts(planned.shoal.plan.graph) >= 3


def _parts(graph: StepGraph) -> int:
    return len({op.name.split(".")[0] for op in graph.ops if op.name.startswith("part")})


def _batch(graph: StepGraph) -> int:
    return next(s.shape[0] for s in graph.storages if s.kind == "input")
