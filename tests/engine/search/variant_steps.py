"""Dynamo's graph of a model, whose variants are made of it, and what a training step leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn


def captured(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph and its inputs, those of the model among them."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append((gm, list(inputs)))
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(x)
    graph, inputs = found[0]
    return graph, inputs


def step(run: Callable[[], torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The output of one step, all gradients and all buffers afterwards."""
    model.zero_grad()
    torch.manual_seed(1)
    y = run()
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"y": y.detach(), **gradients, **{name: buffer.clone() for name, buffer in model.named_buffers()}}
