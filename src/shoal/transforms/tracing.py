"""A model as a torch.fx graph: traced in one mode and left as it was, and the modules that must not be taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from shoal.transforms.stand_in import StandIn


class UntraceableError(Exception):
    """torch.fx cannot trace a model; its text is the reason, in one line."""


def trace(model: nn.Module, tracer: fx.Tracer, *, training: bool) -> fx.Graph:
    """The graph of `model`'s forward pass in training or in eval mode.

    Replaces, in plain PyTorch, `torch.fx.symbolic_trace(model.train(training)).graph`; every module keeps its own mode.

    Args:
        model: any network; nothing is run. Of what a transform returned, the graph that it made.
        tracer: says which modules are called as they are, and not entered.
        training: the mode of every module while it is traced.

    Raises:
        UntraceableError: the forward pass branches on tensors, or does something else that torch.fx cannot record, such
            as a part without gradients, under autocast or checkpointed: it would leave that out without a word.

    >>> [node.name for node in trace(nn.Sequential(nn.ReLU()), fx.Tracer(), training=True).nodes]
    ['input_1', '_0', 'output']
    """
    if isinstance(model, StandIn):
        graph = model.graph(training=training)
        if graph is None:
            raise UntraceableError(f"it is what {model.made_by} returned")
        return graph
    outside, create_node = _ways_to_run(), tracer.create_node

    def checked(*args: Any, **kwargs: Any) -> fx.Node:
        if _ways_to_run() != outside:
            raise UntraceableError("a part of it runs without gradients, under autocast or checkpointed")
        return create_node(*args, **kwargs)

    tracer.create_node = checked  # type: ignore[method-assign]
    try:
        with _in_mode(model, training):
            return tracer.trace(model)
    except Exception as error:
        raise UntraceableError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def has_hooks(module: nn.Module) -> bool:
    """Whether something else runs where the module is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _ways_to_run() -> tuple[object, ...]:
    """What a context in a forward pass may change for the layers in it, and a graph does not tell."""
    autocast = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, saving


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
