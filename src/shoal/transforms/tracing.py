"""A model as a torch.fx graph: traced in one mode and left as it was, and the modules that must not be taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        UntraceableError: the forward pass branches on tensors, or does something else that torch.fx cannot record.

    >>> [node.name for node in trace(nn.Sequential(nn.ReLU()), fx.Tracer(), training=True).nodes]
    ['input_1', '_0', 'output']
    """
    if isinstance(model, StandIn):
        graph = model.graph(training=training)
        if graph is None:
            raise UntraceableError(f"it is what {model.made_by} returned")
        return graph
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


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
