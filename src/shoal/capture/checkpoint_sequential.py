"""`torch.utils.checkpoint.checkpoint_sequential` in a graph: Dynamo traces `checkpoint`, and breaks at this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@cache
def trace_checkpoint_sequential() -> None:
    """Let Dynamo trace it from here on, in whichever model of this process."""
    try:
        torch.compiler.substitute_in_graph(checkpoint_sequential, skip_signature_check=True)(_in_parts)
    except ValueError:  # another library has told Dynamo how
        return


def _in_parts(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """As PyTorch's function computes it; `use_reentrant` says nothing in a graph."""
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
            part(start, end),
            input,
            use_reentrant=use_reentrant is not False,
            preserve_rng_state=preserve_rng_state,
        )
    return part(end, len(layers))(input)
