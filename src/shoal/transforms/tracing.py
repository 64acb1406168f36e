"""A model as a torch.fx graph: traced in one mode and left as it was, and the modules that must not be taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import CaptureError, InputError
from shoal.lowlevel.process_groups import sharded_modules
from shoal.lowlevel.torch_state import saved_tensors_hooks
from shoal.transforms.stand_in import StandIn
from shoal.transforms.writes import IN_PLACE_OPERATORS, Writes


class UntraceableError(Exception):
    """torch.fx cannot trace a model; its text is the reason, in one line."""


def trace(model: nn.Module, tracer: fx.Tracer, *, training: bool) -> fx.Graph:
    """The graph of `model`'s forward pass in training or in eval mode.

    Replaces, in plain PyTorch, `torch.fx.symbolic_trace(model.train(training)).graph`; every module keeps its own mode.

    Args:
        model: any network; nothing is run. Of what a transform returned, the graph that it made.
        tracer: decides which modules are called as they are, and not entered.
        training: the mode of every module while it is traced.

    Raises:
        UntraceableError: the forward pass branches on tensors, or does something else that torch.fx cannot record, such
            as a part without gradients, under autocast or checkpointed: it would leave that out without a word. Or what
            it does depends on whether an argument is given: to torch.fx all are.

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
    tracer.proxy = lambda node: _Proxy(node, tracer)  # type: ignore[method-assign]
    try:
        with _in_mode(model, training):
            graph = tracer.trace(model)
            optional = [str(node.target) for node in graph.nodes if node.op == "placeholder" and node.args]
            if optional and _calls_without_optional(model, tracer) not in (_calls(graph), None):
                raise UntraceableError(f"what it does depends on whether it is given {' and '.join(optional)}")
            add_to_new_memory(model, graph)
            return graph
    except UntraceableError:
        raise
    except Exception as error:
        raise UntraceableError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def traced(model: nn.Module, tracer: fx.Tracer, *, training: bool, instead: str) -> fx.Graph:
    """`trace`, for a transform that cannot do without the graph.

    Args:
        model, tracer, training: as of `trace`.
        instead: what to do where the model cannot be traced: "split a part of it".

    Raises:
        CaptureError: torch.fx cannot trace the model; it says why.
        InputError: it is sharded.
    """
    if any(sharded_modules(model)):
        raise InputError(
            f"{type(model).__name__} is sharded already; transform the network first, then apply fully_shard to the "
            "result as a whole"
        )
    try:
        return trace(model, tracer, training=training)
    except UntraceableError as reason:
        raise CaptureError(
            f"torch.fx cannot trace {type(model).__name__}: {reason}; {instead} that has no control flow over tensors, "
            "and put that in its place"
        ) from reason


class _Proxy(fx.Proxy):
    """Records `x += y` as what it is: torch.fx's own records `x = x + y`, which other names of `x` do not see."""


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(proxy: fx.Proxy, other: Any) -> fx.Proxy:
        return proxy.tracer.create_proxy("call_function", function, (proxy, other), {})

    return recorded


for _augmented in IN_PLACE_OPERATORS:
    setattr(_Proxy, f"__{_augmented.__name__}__", _in_place(_augmented))


def add_to_new_memory(model: nn.Module, graph: fx.Graph) -> None:
    """`x = x + y` in place of `x += y` where no other name of `x` sees the difference: fewer kinds of ops."""
    writes = Writes(graph, dict(model.named_modules(remove_duplicate=False)))
    for node in graph.nodes:
        if node.target in IN_PLACE_OPERATORS and writes.is_unnoticed(node):
            node.target = IN_PLACE_OPERATORS[node.target]


def _ways_to_run() -> tuple[object, ...]:
    """What a context in a forward pass may change for the layers in it, which a graph does not record."""
    autocast = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
    saving = saved_tensors_hooks()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, saving


def _calls(graph: fx.Graph) -> str:
    """What it calls, and with what: of an argument that may be left out the value that it has then."""
    values: dict[fx.Node, Any] = {}
    calls: list[object] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = node.args[0] if node.args else node.target
        else:
            values[node] = f"result {len(calls)}"
            calls.append((node.op, node.target, *fx.node.map_arg((node.args, node.kwargs), values.__getitem__)))
    return repr(calls)


def _calls_without_optional(model: nn.Module, tracer: fx.Tracer) -> str | None:
    """`_calls` where nothing is given that may be left out; None where that cannot be: then it has to be given."""
    given = tracer.create_args_for_root

    def only_what_must_be(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        function, values = given(*args, **kwargs)
        for at, value in enumerate(values):
            if isinstance(value, fx.Proxy) and value.node.args:
                values[at] = value.node.args[0]
                value.node.graph.erase_node(value.node)
        return function, values

    tracer.create_args_for_root = only_what_must_be  # type: ignore[method-assign]
    try:
        return _calls(tracer.trace(model))
    except (AttributeError, TypeError):  # of a None that is read
        return None
    finally:
        tracer.create_args_for_root = given  # type: ignore[method-assign]


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
