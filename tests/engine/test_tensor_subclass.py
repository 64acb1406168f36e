"""A tensor that carries something with it goes into a planned step and comes out of it as out of any function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shoal
from tests.engine.training_laws import blocks


class Named(torch.Tensor):
    """A tensor with a name, which results of functions inherit."""

    name: str = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(returned, cls):
            returned.name = next((one.name for one in args if isinstance(one, cls)), "")
        return returned


def named(tensor: torch.Tensor, name: str) -> Named:
    found = tensor.as_subclass(Named)
    found.name = name
    return found


def test_it_is_planned_as_a_plain_tensor_and_keeps_what_it_carries() -> None:
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    states = []
    for budget in (None, "300KiB"):
        torch.manual_seed(0)
        model = nn.Sequential(*blocks(3, 8), nn.Flatten())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if budget is not None:
            shoal.compile(model, budget, optimizer=optimizer, allow="bitwise", options=shoal.Options(strict=True))
        for _ in range(3):
            optimizer.zero_grad()
            output = model(named(images, "scan 7"))
            assert type(output) is Named and output.name == "scan 7"
            output.square().mean().backward()
            optimizer.step()
        states.append(model.state_dict())
    assert model.shoal.plan is not None
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
