"""A graph in which nothing knows a tensor's size ends there: the model is several graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import CaptureError
from tests.engine.training_laws import assert_same_training, blocks, images
from tests.raising import raising


class Picking(nn.Module):
    """A head that reads some of the rows, as a detector's does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*blocks(3, 4, 4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.body(x).permute(0, 2, 3, 1)
        return self.head(self.picked(rows, x)).sum(0) + rows.mean()

    def picked(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return rows[x[:, 0] > 0.5]


class PickingPlaces(Picking):
    def picked(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return rows.flatten(0, 2)[x[:, 0].flatten().relu().nonzero()[:, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Picking, PickingPlaces])
def test_what_a_mask_selects_trains_as_in_plain_pytorch(kind: type[Picking]) -> None:
    planned = assert_same_training(kind(), images(3, 2, 3, 8, 8))
    assert "test_sizes_of_values.py" in planned.shoal.plan.breaks[0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, x: shoal.compile(model, "1GiB", options=shoal.Options(strict=True))(x),
        lambda model, x: shoal.plan(model, x, budget="1GiB"),
        lambda model, x: torch.compile(model, backend="shoal", options={"budget": "1GiB"}, fullgraph=True)(x),
    ],
    ids=["strict", "plan", "backend"],
)
def test_where_one_graph_is_asked_for_the_line_is_named(ask: Callable[[nn.Module, torch.Tensor], object]) -> None:
    torch._dynamo.reset()
    with raising(CaptureError, "test_sizes_of_values.py", "rows[x"):
        ask(Picking(), *images(1, 2, 3, 8, 8))


class Watching(nn.Module):
    """It keeps a number of each step, or computes with one."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(*blocks(3, 4)), nn.Sequential(*blocks(4, 5))
        self.use = use
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        number = y.detach().abs().mean().item()
        match self.use:
            case "kept":
                self.seen.append(number)
            case "rounded":
                y = y * int(10 * number)
            case "counted":
                y = y * (y > 0).sum().item()
            case "a factor":
                y = y * number
            case "part of a factor":
                y = (1 + 2 * number) * y - number
            case "its size":
                y = -number * y / (1 + abs(-number))
        return self.second(y)


@pytest.mark.parametrize(
    ("use", "n_graphs"),
    [("kept", 2), ("rounded", 2), ("counted", 2), ("a factor", 1), ("part of a factor", 1), ("its size", 1)],
)
def test_a_number_of_a_tensor_is_that_of_every_step(use: str, n_graphs: int) -> None:
    batches = images(3, 2, 3, 8, 8)
    planned = assert_same_training(Watching(use), batches)
    assert bool(planned.shoal.plan.breaks) == (n_graphs > 1)
    assert len(set(planned.seen)) == len(planned.seen)


class Reading(nn.Module):
    """Columns of an image, one after another, as where text is read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*blocks(3, 4, 4))
        self.lstm = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read, _ = self.lstm(self.body(x).mean(2).transpose(1, 2))
        return self.head(read)


@pytest.mark.parametrize("allow_rnn", [False, True])
def test_an_lstm_ends_a_graph_whatever_dynamo_may_capture(allow_rnn: bool) -> None:
    with torch._dynamo.config.patch(allow_rnn=allow_rnn):
        planned = assert_same_training(Reading(), images(3, 2, 3, 8, 8))
        assert "test_sizes_of_values.py" in planned.shoal.plan.breaks[0]


def test_a_backend_of_torch_compile_refuses_an_lstm_by_its_line() -> None:
    torch._dynamo.reset()
    model = torch.compile(Reading(), backend="shoal", options={"budget": "1GiB"}, fullgraph=True)
    with (
        torch._dynamo.config.patch(allow_rnn=True),
        raising(CaptureError, "test_sizes_of_values.py"),
    ):
        model(*images(1, 2, 3, 8, 8))


class Narrowing(nn.Module):
    """A window of an image that begins where a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*blocks(3, 4, 4))

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return self.body(x).narrow(3, start, 2).square().mean()


def test_a_view_that_begins_where_a_tensor_says_is_named() -> None:
    torch._dynamo.reset()
    model = shoal.compile(Narrowing(), "1GiB", options=shoal.Options(strict=True))
    with raising(CaptureError, "test_sizes_of_values.py", "where a view begins depends on a tensor's values"):
        model(*images(1, 2, 3, 8, 8), torch.tensor(2))
