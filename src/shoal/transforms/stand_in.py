"""What every transform returns: a network that runs the modules of another in its own way, under their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import fx, nn

from shoal.core import arguments
from shoal.errors import InputError
from shoal.lowlevel.process_groups import sharded_modules

_SHARED = (  # dicts of a module: whatever is set, moved, loaded or registered in one is so in the other
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class Left:
    """A layer that a transform left as it was, and why."""

    layer: str
    reason: str


class StandIn(nn.Module):
    """Shares everything with the network it stands in for but the forward pass, which its subclasses have.

    Parameters, buffers, modules, names in state dicts and hooks on the network itself are the same in both; the mode
    goes from here to the network, through its own `train`.

    Attributes:
        made_by: the function that returns it, for messages.
    """

    made_by: ClassVar[str]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for shared in _SHARED:
            setattr(self, shared, getattr(model, shared))
        self._is_full_backward_hook = model._is_full_backward_hook
        self.training = model.training
        self._source = (model,)  # in a tuple, so that it is not a child
        self._remember_layers()

    @property
    def source(self) -> nn.Module:
        """The network it was made from, with the same parameters."""
        return self._source[0]

    def train(self, mode: bool = True) -> Self:
        self.source.train(mode)
        self.training = self.source.training
        return self

    def _remember_layers(self) -> None:
        """Take the layers that the network has now for those that it was made from."""
        self._layers = tuple((m._modules, tuple(m._modules.values())) for m in self.modules() if m._modules)

    def _has_other_layers(self) -> bool:
        """Whether one was replaced, put in or taken out since; in eager mode, since compilers keep what they saw."""
        return not torch.compiler.is_compiling() and any(
            tuple(children.values()) != known for children, known in self._layers
        )

    def reject_sharded_parts(self) -> None:
        """Raise InputError if `fully_shard` was applied to a module inside: its layers are called one by one here, so
        that nothing would gather their weights."""
        for name, _ in sharded_modules(self.source):
            raise InputError(
                f"the part {name!r} is sharded, and {self.made_by} calls its layers one by one; "
                f"apply fully_shard only to what {self.made_by} returned, as a whole"
            )

    def graph(self, *, training: bool) -> fx.Graph | None:
        """What it runs in a mode, for other transforms to copy; None where they cannot go on from there.

        torch.fx cannot trace `forward`, which takes whatever the network takes.
        """
        return None


def check_network(model: object, hint: str) -> None:
    """Whether a transform can go on from a model.

    Args:
        model: what the transform was given.
        hint: what to do instead, where another transform's result cannot be transformed again; "{made_by}" is that
            transform.

    Raises:
        InputError: it is not a network, or such a result.
    """
    arguments.instance("model", model, nn.Module)
    if isinstance(model, StandIn) and model.graph(training=True) is None:
        raise InputError(f"the model is what {model.made_by} returned{hint.format(made_by=model.made_by)}")
