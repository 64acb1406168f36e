"""What Dynamo and AOTAutograd hold of a capture and of a function, under names that PyTorch does not guarantee."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import eval_frame
from torch._guards import TracingContext

_eval_frame: Any = eval_frame
_autograd: Any = torch._C._autograd
data_of: Any = _autograd._get_data_attr
"""What Dynamo writes into its graphs for `tensor.data`."""


def settings_of_pytorch() -> GlobalStateGuard:
    """Grad mode, autocast and the other settings that a capture depends on; `check()` is whether they are the same."""
    return GlobalStateGuard()


def guards_of_inputs() -> list[Any]:
    """What AOTAutograd asks Dynamo to guard of the graph's inputs, of the capture that is under way."""
    context = TracingContext.try_get()
    return [] if context is None else context.guards_context.aotautograd_guards


def forget_code(code: CodeType) -> None:
    """Let Dynamo drop all that it compiled of a function: a map of its own keeps that and the code alive together."""
    _eval_frame.reset_code(code)


def assign_data_of(fake: Any, given: torch.Tensor) -> None:
    """Give a fake tensor new data of the shape and strides of a real one."""
    with fake.fake_mode, torch.no_grad():
        fake.set_(torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device))
