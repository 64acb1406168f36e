"""Every step of every optimizer of the process, told to whom it may concern."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """Who is told."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None: ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def tell(listener: Listener) -> None:
    """Call `listener.optimizer_stepped` after each step, as long as somebody else holds `listener`.

    A step that runs inside a compiled function is not seen.
    """
    _register()
    _listeners.add(listener)


@cache
def _register() -> None:
    register_optimizer_step_post_hook(_told)


def _told(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer)
