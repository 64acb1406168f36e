"""In which order a forward pass first reads its parameters, and which of them before their module is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class FirstUse(TorchFunctionMode):
    """Watches one forward pass.

    Attributes:
        order: the parameters that were read, first read first.
        early: those of them that were read before `announce` named them.

    >>> layer = torch.nn.Linear(2, 1)
    >>> watch = FirstUse(layer.parameters())
    >>> watch.announce([layer.weight])
    >>> with watch:
    ...     _ = layer(torch.ones(1, 2))
    >>> [parameter is layer.weight for parameter in watch.order], len(watch.early)
    ([True, False], 1)
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        self._unseen = {id(parameter): parameter for parameter in parameters}
        self._announced: set[int] = set()
        self.order: list[torch.nn.Parameter] = []
        self.early: list[torch.nn.Parameter] = []

    def announce(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The module that owns these is about to be called."""
        self._announced.update(map(id, parameters))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)) if self._unseen else ():
            parameter = self._unseen.pop(id(leaf), None)
            if parameter is not None:
                self.order.append(parameter)
                if id(parameter) not in self._announced:
                    self.early.append(parameter)
        return func(*args, **(kwargs or {}))
