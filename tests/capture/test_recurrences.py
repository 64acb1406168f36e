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
