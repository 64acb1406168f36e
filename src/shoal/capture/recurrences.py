"""Recurrent layers: eager code between two graphs of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.trace_rules import _disallowed_callable_ids

from shoal.lowlevel.resume_functions import resuming_in_loops

BREAKS = "an LSTM, a GRU or an RNN runs as PyTorch runs it, outside of all graphs"
_FORWARDS = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)
_FUNCTIONS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


@contextmanager
def between_graphs() -> Iterator[None]:
    """While the block runs, Dynamo ends a graph where a recurrent layer is called, and goes on after it.

    By its own rule it gives up where the layer's name is read, from which it cannot go on: what follows in that
    function would be left out of all graphs, and so would all of a function that calls it in a loop over its layers.
    """
    with ExitStack() as undone:
        undone.enter_context(config.patch(allow_rnn=True))
        for forward in _FORWARDS:  # as by torch.compiler.disable
            for name, value in (("_torchdynamo_disable", True), ("_torchdynamo_disable_msg", BREAKS)):
                if not hasattr(forward, name):
                    setattr(forward, name, value)
                    undone.callback(delattr, forward, name)
        for function in _FUNCTIONS:
            if id(function) not in _disallowed_callable_ids:
                _disallowed_callable_ids.add(id(function))
                undone.callback(_disallowed_callable_ids.remove, id(function))
        undone.enter_context(resuming_in_loops(lambda reason: in_words(reason) == BREAKS))
        yield


def in_words(reason: str) -> str:
    """Why Dynamo ends a graph, in one line.

    >>> in_words("Attempted to wrap RNN, GRU, or LSTM\\n  Explanation: ...")
    'an LSTM, a GRU or an RNN runs as PyTorch runs it, outside of all graphs'
    """
    signs = BREAKS, "RNN, GRU, or LSTM", *(f"qualname: {one.__qualname__}," for one in _FUNCTIONS)
    return BREAKS if any(sign in reason for sign in signs) else reason.strip().splitlines()[0]
