"""Recurrent layers: graphs end at them, and go on after them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.trace_rules import _disallowed_callable_ids

from tests.engine.training_laws import assert_same_training


class Tagger(nn.Module):
    """A tag for each word, all on one line."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(20, 8), kind(8, 6, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(12, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.tags(self.recurrent(self.words(words))[0])


class LastState(Tagger):
    """The state after the last word says what the text is about."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        words = self.words(words)
        _, state = self.recurrent(words)
        state = state[0] if isinstance(state, tuple) else state
        return self.tags(torch.cat([state[0], state[1]], 1))


def texts(count: int) -> list[torch.Tensor]:
    return list(torch.randint(20, (count, 3, 7)))


@pytest.mark.parametrize("network", [Tagger, LastState])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_is_before_and_behind_a_recurrent_layer_is_captured(
    network: Callable[[Callable[..., nn.Module]], nn.Module], kind: Callable[..., nn.Module]
) -> None:
    planned = assert_same_training(network(kind), texts(3))
    assert planned.shoal.captures == 2
    (place,) = planned.shoal.plan.breaks
    assert "test_recurrences.py" in place
    assert place.endswith(": an LSTM, a GRU or an RNN runs as PyTorch runs it, outside of all graphs")


def test_other_graphs_of_the_process_may_have_recurrent_layers_as_before() -> None:
    assert_same_training(Tagger(nn.GRU), texts(2))
    assert id(torch.gru) not in _disallowed_callable_ids
    assert not torch._dynamo.config.allow_rnn


class Bare(Tagger):
    """The function of the layer without the layer."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x, weights = self.words(words), [weight for weights in self.recurrent.all_weights for weight in weights]
        state = x.new_zeros(2, len(x), 6)
        return self.tags(torch.gru(x, state, weights, True, 1, 0.0, True, True, True)[0])


def test_the_function_of_a_recurrent_layer_ends_a_graph_too() -> None:
    planned = assert_same_training(Bare(nn.GRU), texts(3))
    assert planned.shoal.captures == 2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.recurrent(x)[0] + x
        return result


class Loop(nn.Module):
    """Layers in a list, which the model calls one after another."""

    def __init__(self, kind: Callable[[list[nn.Module]], nn.Module]) -> None:
        super().__init__()
        first, middle = [nn.Linear(8, 8), nn.ELU()], [nn.Linear(8, 8), nn.Tanh()]
        self.layers = kind([*first, Residual(), *middle, Residual(), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda layers: nn.Sequential(*layers)], ids=["list", "row"])
def test_a_loop_over_layers_goes_on_after_a_recurrent_one(kind: Callable[[list[nn.Module]], nn.Module]) -> None:
    iterates = nn.ModuleList.__iter__, nn.Sequential.__iter__
    planned = assert_same_training(Loop(kind), list(torch.randn(3, 2, 5, 8)))
    assert planned.shoal.captures == 4  # around the recurrent layers, and the sum in each of both
    assert all(
        "test_recurrences.py" in place and "outside of all graphs" in place for place in planned.shoal.plan.breaks
    )
    assert (nn.ModuleList.__iter__, nn.Sequential.__iter__) == iterates


class ByTime(nn.Module):
    """A recurrent layer that is called for each word."""

    def __init__(self, condition: bool) -> None:
        super().__init__()
        self.condition, self.recurrent = condition, nn.GRU(8, 8)
        self.first, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ELU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, state, time = torch.sin(self.first(x)), None, 0
        if self.condition:
            while time < len(x):
                _, state = self.recurrent(x[time : time + 1], state)
                time += 1
        else:
            for time in range(len(x)):
                _, state = self.recurrent(x[time : time + 1], state)
        result: torch.Tensor = self.last(state)
        return result


def test_a_short_loop_goes_on() -> None:
    planned = assert_same_training(ByTime(condition=False), list(torch.randn(2, 3, 2, 8)))
    assert planned.shoal.captures == 4  # before the first word, after the last, and what takes each of the others


@pytest.mark.parametrize("condition", [False, True])
def test_a_long_loop_is_left_out_as_a_whole(condition: bool) -> None:
    """Each iteration would be a capture of the same function, of which there may be 64."""
    planned = assert_same_training(ByTime(condition), list(torch.randn(2, 70, 2, 8)))
    assert planned.shoal.captures == 1
