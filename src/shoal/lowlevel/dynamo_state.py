"""What Dynamo and AOTAutograd hold of a capture and of a function, under names that PyTorch does not guarantee."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import CleanupManager
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


def forget_backend(backend: object) -> None:
    """Let Dynamo drop all that a backend compiled, of whichever function: where a graph breaks, of code of the model's
    class too, for as long as that code lives."""
    for seen in list(convert_frame.input_codes.seen):
        code = seen()
        for entry in () if code is None else _eval_frame._debug_get_cache_entry_list(code):
            guards = entry.guard_manager
            if getattr(entry.backend, "compiler_fn", None) is backend and guards.extra_state is not None:
                hooks = CleanupManager.instance.get(entry.code, [])
                guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper("the model was deleted"))
                # An invalid entry keeps its code; what that calls are globals of the module in which it was defined.
                for hook in [hook for hook in hooks if hook.name.startswith("__compiled_fn")]:
                    hooks.remove(hook)
                    hook.scope.pop(hook.name, None)


def assign_data_of(fake: Any, given: torch.Tensor) -> None:
    """Give a fake tensor new data of the shape and strides of a real one."""
    with fake.fake_mode, torch.no_grad():
        fake.set_(torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device))
