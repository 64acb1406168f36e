"""What a model's code reads out of small buffers is known to Dynamo, and never out of date."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.lowlevel.buffer_values import knowing_buffers
from tests.engine.training_laws import assert_same_training, differences, needs_compiler, train


class Padded(nn.Module):
    """A convolution that keeps its sizes in buffers, computes with them and branches on them, as EnCodec's do."""

    def __init__(self, inputs: int, channels: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, channels, kernel_size, stride)
        self.register_buffer("stride", torch.tensor(stride), persistent=False)
        self.register_buffer("kernel_size", torch.tensor(kernel_size), persistent=False)
        self.register_buffer("padding", torch.tensor(kernel_size - stride), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        frames = torch.ceil((length - self.kernel_size + self.padding) / self.stride + 1).to(torch.int64) - 1
        right = frames * self.stride + self.kernel_size - self.padding - length
        most = max(self.padding, right)
        more = 0
        if length <= most:
            more = most - length + 1
            x = F.pad(x, (0, more))
        x = F.pad(x, (self.padding, right), mode="reflect")
        x = x[..., : x.shape[-1] - more]
        return self.conv(x)


def padded() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Padded(2, 4, 7, 1), nn.ELU(), Padded(4, 8, 4, 2), nn.ELU(), Padded(8, 2, 3, 1))


def sounds(steps: int, length: int = 21) -> list[torch.Tensor]:
    return list(torch.randn(steps, 2, 2, length, generator=torch.Generator().manual_seed(1)))


def test_a_model_that_pads_by_buffers_and_branches_on_them_is_one_graph() -> None:
    planned = assert_same_training(padded(), sounds(3))
    assert planned.shoal.captures == 1
    assert not planned.shoal.plan.breaks


def test_so_it_is_where_the_branch_is_taken() -> None:
    planned = assert_same_training(padded(), sounds(2, length=5))
    assert planned.shoal.captures == 1
    assert not planned.shoal.plan.breaks


@pytest.mark.slow
def test_each_length_that_the_branch_depends_on_is_one_graph() -> None:
    planned = assert_same_training(padded(), [sounds(1, length=length)[0] for length in (21, 30, 21, 17, 5)])
    assert planned.shoal.captures == 4
    assert not planned.shoal.plan.breaks


def test_a_buffer_that_is_given_another_value_between_steps_is_captured_again() -> None:
    plain, planned = padded(), padded()
    shoal.compile(planned, budget="1TiB")
    for number, padding in enumerate((3, 5, 3, 3), 1):
        for model in (plain, planned):
            model[0].padding.fill_(padding)
        assert not differences(train(planned, sounds(1)), train(plain, sounds(1)))
        assert planned.shoal.captures == min(number, 2)


class Kept(nn.Module):
    """A layer with a number in a buffer."""

    def __init__(self, value: int | bool = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("number", torch.tensor(value))

    def chosen(self, x: torch.Tensor, yes: Any) -> torch.Tensor:
        return self.layer(x) if yes else x * self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chosen(x, self.number > 1)


class Flag(Kept):
    def __init__(self) -> None:
        super().__init__(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chosen(x, self.number)


class Asks(Kept):
    """In every way in which a number is asked for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.number > 0
        y = torch.cat([x] * int(self.number), 1)[:, : self.number] + torch.zeros(self.number).sum() + float(self.number)
        y = y.view(self.number, -1).repeat(1, self.number) + (1 if not self.number else self.number.item())
        while self.number > 5:
            y = y + 1
        return self.layer(y[:, :3]) + [x, y][(self.number - 1).item()].sum()


class InCheckpoint(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class CountsBefore(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return self.chosen(x, self.number > 4)


class CountsAfter(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.chosen(x, self.number > 4)
        self.number.add_(1)
        return y


class CountsInData(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number.data.add_(1)
        return self.chosen(x, self.number > 4)


class AssignsData(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number.data = self.number + 1
        return self.chosen(x, self.number > 4)


class CountsInCheckpoint(Kept):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.number.add_(1)
        return self.layer(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chosen(checkpoint(self.inner, x, use_reentrant=False), self.number > 4)


class CountsInAnother(Kept):
    """Of the same storage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.number.view(1))

    def __deepcopy__(self, memo: dict[int, Any]) -> CountsInAnother:
        copied = CountsInAnother()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.view.add_(1)
        return self.chosen(x, self.number > 4)


class CountsInACopy(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied = torch.zeros((), dtype=torch.int64)
        copied.add_(self.number)
        self.number.add_(1)
        return self.chosen(x, copied > 4)


class IsAnother(Kept):
    """With a new tensor in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number = self.number + 1
        return self.chosen(x, self.number > 4)


class Random(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chosen(x, torch.randint(0, 2, ()) + self.number > 2)


def called(model: Kept, calls: int, change: Callable[[Kept], object] = lambda model: None) -> list[int]:
    """Holds calls of the model within Dynamo against the same without; how many graphs there were after each."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    plain, captured = copy.deepcopy(model), torch.compile(model, backend=backend)
    x, counts = torch.randn(2, 3), []
    for seed in range(calls):
        change(plain)
        change(model)
        results = []
        for call in (plain, captured):
            torch.manual_seed(seed)
            with knowing_buffers():
                results.append(call(x))
        assert torch.equal(*results)
        assert torch.equal(plain.number, model.number)
        counts.append(len(graphs))
    return counts


@pytest.mark.parametrize("kind", [Kept, Flag, Asks, InCheckpoint])
def test_what_stays_is_known(kind: type[Kept]) -> None:
    assert called(kind(), 3) == [1, 1, 1]


@pytest.mark.parametrize(
    "kind",
    [
        CountsBefore,
        CountsAfter,
        CountsInData,
        AssignsData,
        CountsInCheckpoint,
        CountsInAnother,
        CountsInACopy,
        Random,
    ],
)
def test_what_the_graph_changes_is_unknown(kind: type[Kept]) -> None:
    counts = called(kind(), 8)
    assert counts[0] > 1  # the graph breaks at the branch
    assert counts[-4:] == [counts[-1]] * 4  # and there are no more once both sides of it are captured


@pytest.mark.parametrize("kind", [IsAnother, Kept])
def test_a_counter_is_unknown_in_the_end(kind: type[Kept]) -> None:
    def count(model: Kept) -> None:
        if kind is Kept:
            model.number.add_(1)

    counts = called(kind(-3), 12, count)
    assert counts[:4] == [1, 2, 3, 4]
    assert counts[-4:] == [counts[-1]] * 4


@pytest.mark.slow
@needs_compiler  # as a plan of several graphs does
@pytest.mark.parametrize("kind", [CountsBefore, CountsAfter])
def test_a_model_with_a_counter_trains_as_before(kind: type[Kept]) -> None:
    planned = assert_same_training(
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3), kind()), list(torch.randn(6, 4, 3))
    )
    assert planned.shoal.plan.breaks


@pytest.mark.slow
@needs_compiler
def test_a_buffer_that_another_one_sets_each_step_does_not_end_the_training() -> None:
    """A schedule of the loop's own: after a few values the model is several graphs."""
    plain, planned = (nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3), Kept()) for _ in range(2))
    planned.load_state_dict(plain.state_dict())
    shoal.compile(planned, budget="1TiB")
    for step in range(8):
        for model in (plain, planned):
            model[3].number.fill_(step - 4)
        batches = list(torch.randn(1, 4, 3))
        assert not differences(train(planned, batches), train(plain, batches))
    assert planned.shoal.plan.breaks


def test_without_effect_on_others() -> None:
    with knowing_buffers():
        pass
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Kept(), backend=backend)(torch.randn(2, 3))
    assert len(graphs) > 1


class RoundsUp(nn.Module):
    """Pads to whole windows, whose number NumPy tells, as MONAI's SwinUNETR does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = int(np.ceil(x.shape[0] / 4)) * 4
        return self.after(F.pad(self.before(x), (0, 0, 0, rows - x.shape[0])).relu())


def test_a_model_that_computes_with_sizes_in_numpy_is_one_graph() -> None:
    planned = assert_same_training(RoundsUp(), [torch.randn(rows, 3) for rows in (5, 5, 7, 10, 4)])
    assert not planned.shoal.plan.breaks
