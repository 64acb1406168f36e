"""Which gradients of a call leave its backward pass where they are final, and what becomes of them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.capture.early_gradients import Fate
from shoal.lowlevel.torch_state import has_gradient_hook


@dataclass(frozen=True)
class EarlyGradients:
    """How the gradients of a call are used while its backward pass runs.

    Attributes:
        sent: whether a `DistributedDataParallel` wrapper sends them. into_views: and keeps them only in its buckets.
        added: whether they are added to gradients that are there.
        unsent: ids of the parameters that the wrapper leaves out.
    """

    sent: bool = False
    into_views: bool = False
    added: bool = False
    unsent: frozenset[int] = frozenset()

    @staticmethod
    def of(wrapper: DistributedDataParallel | None, *, added: bool) -> EarlyGradients:
        """Of a call.

        Args:
            wrapper: what calls the model.
            added: as the attribute.
        """
        if wrapper is None or not wrapper.require_backward_grad_sync or wrapper.mixed_precision is not None:
            return EarlyGradients(added=added)
        ignored = wrapper.parameters_to_ignore
        unsent = frozenset(id(p) for name, p in wrapper.module.named_parameters() if name in ignored) if ignored else ()
        return EarlyGradients(True, bool(wrapper.gradient_as_bucket_view), added, frozenset(unsent))

    def fates(self, inputs: Sequence[Any], hook_bytes: Callable[[nn.Parameter], int]) -> dict[int, Fate]:
        """The fate of each gradient that leaves early, by the place of its parameter among a graph's inputs.

        Args:
            inputs: of the graph.
            hook_bytes: what a parameter's hook allocates while it runs.
        """
        trained = {place: value for place, value in enumerate(inputs) if getattr(value, "requires_grad", False) is True}
        if not all(isinstance(value, nn.Parameter) for value in trained.values()):
            return {}  # what is no leaf may be written over by the model, which an alias of it would hide
        found: dict[int, Fate] = {}
        for place, parameter in trained.items():
            if has_gradient_hook(parameter):
                found[place] = Fate("hook", hook_bytes(parameter))
            elif self.sent and id(parameter) not in self.unsent:
                is_freed = self.into_views or (self.added and parameter.grad is not None)
                found[place] = Fate("freed" if is_freed else "stays")
        return found
