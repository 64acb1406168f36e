"""What `nn.DataParallel` finds where it copies a model with a budget to other devices: a refusal."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from shoal.errors import InputError


class Unreplicated:
    """Stands in for a model's `_replicate_for_data_parallel`. A copy of the model has the plain one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> NoReturn:
        name = type(self._model()).__name__
        raise InputError(
            f"nn.DataParallel copies {name}, which has a budget, to several devices in each step; wrap it in "
            "DistributedDataParallel, where each rank has its budget"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._model()))
        return None if copied is None else MethodType(type(copied)._replicate_for_data_parallel, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._model(), "_replicate_for_data_parallel")
