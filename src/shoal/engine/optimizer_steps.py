"""Notifies sessions after every step of every optimizer of the process."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """An object that is notified."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None: ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(listener: Listener) -> None:
    """Call `listener.optimizer_stepped` after each step, as long as somebody else holds `listener`.

    A step that runs inside a compiled function is not seen.
    """
    _register()
    _listeners.add(listener)


@cache
def _register() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer)
