"""Functions of PyTorch at which Dynamo breaks a graph, written so that it traces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@cache
def trace_more_functions() -> None:
    """Let Dynamo trace them from here on, in whichever model of this process."""
    get_torch_obj_rule_map().pop(torch.jit.isinstance, None)  # by its rule nothing of torch.jit is traced
    for function, traced in ((checkpoint_sequential, _in_parts), (torch.jit.isinstance, _is_instance)):
        try:
            torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
        except ValueError:  # another library has told Dynamo how
            continue


def _is_instance(value: Any, kind: Any) -> bool:
    """`torch.jit.isinstance`; what a container holds is looked at outside the graph."""
    if isinstance(kind, tuple):
        return any(_is_instance(value, one) for one in kind)
    if not isinstance(kind, type):
        torch._dynamo.graph_break("torch.jit.isinstance looks at what a container holds")
        return torch.jit.isinstance(value, kind)  # where Dynamo goes on in here
    return isinstance(value, kind)


def _in_parts(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`checkpoint_sequential`; `use_reentrant` says nothing in a graph."""
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    layers = list(functions.children()) if isinstance(functions, nn.Sequential) else functions

    def part(start: int, end: int) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            for layer in layers[start:end]:
                x = layer(x)
            return x

        return forward

    length, end = len(layers) // segments, 0
    if not length:
        raise ValueError("range() arg 3 must not be zero")  # as Python says it; Dynamo fails on such a range
    for start in range(0, length * (segments - 1), length):
        end = start + length
        input = checkpoint(
            part(start, end), input, use_reentrant=use_reentrant is not False, preserve_rng_state=preserve_rng_state
        )
    return part(end, len(layers))(input)
