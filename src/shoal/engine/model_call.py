"""What stands in for the call of a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from shoal.capture.dynamo import ModelRaised, plain_call
from shoal.engine.snapshot import Snapshot
from shoal.errors import CaptureError
from shoal.lowlevel.torch_state import in_transform


class ModelCall:
    """The call of a model that has a budget. A copy of the model, or one that is loaded, has its plain call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any] | None:
        """The plain call of the model's copy."""
        copied = memo.get(id(self.model))
        return None if copied is None else MethodType(type(copied)._call_impl, copied)

    def __reduce__(self) -> Any:
        """The plain call of the model as it is loaded: an attribute that it has before its state exists."""
        return getattr, (self.model, "_call_impl")

    def install(self, *compiled: nn.Module, status: object) -> None:
        """Take the place of the model's call, as `model.compile()` does, where Dynamo looks too.

        Args:
            compiled: get `status` as their attribute `shoal`.
            status: what is told of the model.
        """
        for module in compiled:
            object.__setattr__(module, "shoal", status)
        object.__setattr__(self.model, "_compiled_call_impl", self)
        object.__setattr__(self.model, "_call_impl", self)


def raise_as_plain(model: nn.Module, raised: ModelRaised, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raise what the plain model raises in this call; where it does not, Dynamo saw wrong, and that is raised."""
    before = Snapshot(model)
    plain_call(model, *args, **kwargs)
    before.restore()
    raise raised.fault


def reject_function_transforms() -> None:
    """Raise CaptureError where a transform of `torch.func` is active."""
    if in_transform():
        raise CaptureError(
            "a model with a budget cannot be called under torch.func or forward-mode AD; call copy.deepcopy(model) "
            "there, which has no budget"
        )
