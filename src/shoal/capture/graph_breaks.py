"""How Dynamo captures a model that is several graphs: each by itself, with eager code between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import fx, nn

from shoal.capture.dynamo import call_of, held_weakly, place_of, refusals
from shoal.capture.known_graphs import KnownGraphs
from shoal.capture.layer_by_layer import containers, entered, in_a_row
from shoal.capture.recurrences import between_graphs, in_words
from shoal.lowlevel.resume_functions import releasing_arguments
from shoal.lowlevel.torch_state import on_this_rank
from shoal.lowlevel.torch_versions import COUNTED_APART


def capturing_parts(model: nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """The model's call as it is to be called under `settings`, where it is not one graph: `backend` compiles each.

    Between its graphs the model runs eagerly, as under `torch.compile`. What that would leave out of all graphs, the
    containers of torch.nn in a function that Dynamo gives up, is captured too, and what surrounds a recurrent layer.
    No function in which it goes on holds what the model itself would have released.
    """
    for module in containers(model):
        object.__setattr__(module, "_compiled_call_impl", entered(module))
    layers = entered(model) if in_a_row(model) else None

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with refusals():
            return known.compiled(gm, example_inputs, backend)

    known = KnownGraphs()
    # Functions between breaks are other models', too, such as those of torch.nn: their graphs are counted apart.
    apart = dict(COUNTED_APART)
    if any(on_this_rank(p) is not p for p in model.parameters()):
        apart["dynamic"] = False  # blocks of other sizes share the code of one class: they are no sizes that vary
    run = torch.compile(call_of(model, layers), backend=held_weakly(compile_graph), **apart)  # type: ignore[call-overload]

    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        with between_graphs(), releasing_arguments():
            return run(*args, **kwargs)

    call.compiles = compile_graph  # type: ignore[attr-defined]  # holds it: Dynamo does not
    return call


def break_after(gm: fx.GraphModule) -> str:
    """What ends a graph of Dynamo's, in words; "" where it ends with its function."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    return f"{place_of(reason.user_stack)}: {in_words(reason.reason)}"
