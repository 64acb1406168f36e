"""Calls in eval mode: they run as without a budget, and where one is sent back that is said once."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shoal.engine.session import Session
from shoal.lowlevel.torch_state import in_trace, in_transform, is_exporting

log = logging.getLogger("shoal")


class EvalSteps:
    """Watches what a model returns in eval mode, until a result is sent back.

    Args:
        session: of the model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_said = session.status.budget_bytes is None

    def watch(self, outputs: Any) -> None:
        """Say it when a backward pass reaches one of these results of a call."""
        if torch.compiler.is_compiling() or self._is_said or not torch.is_grad_enabled():
            return
        if is_exporting() or in_trace() or in_transform():
            return
        for one in tree_leaves(outputs):
            if type(one) is torch.Tensor and one.grad_fn is not None:
                one.register_hook(self._sent_back)

    def _sent_back(self, gradient: torch.Tensor) -> None:
        if self._is_said:
            return
        self._is_said = True
        log.warning(
            "%s: a call in eval mode has been sent back; no plan is made for one, and it takes what it does in plain "
            "PyTorch, whatever the budget: call train(), and then eval() of the layers that are to stand still",
            self._session.name or "model",
        )
