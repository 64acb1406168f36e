"""Views in a trace with the strides that eager PyTorch gives them.

A view's stride along a dimension of one element can be any number, and the fake `aten.view` chooses others than the
real one. Kernels do look at them (`is_contiguous`, `suggest_memory_format`): with a batch of one, a trace would follow
another path than eager PyTorch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


@contextmanager
def eager_views() -> Iterator[None]:
    """Give traced views their real strides while the block runs."""
    before = {view: op_implementations_dict[view] for view in _VIEWS if view in op_implementations_dict}
    op_implementations_dict.update({view: _with_real_strides(view, traced) for view, traced in before.items()})
    FakeTensorMode.cache_clear()  # of what was traced outside of the block, as Dynamo does
    try:
        yield
    finally:
        op_implementations_dict.update(before)
        FakeTensorMode.cache_clear()


def _with_real_strides(view: Any, traced: Any) -> Any:
    def implementation(mode: FakeTensorMode, func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = traced(mode, func, x, *args, **kwargs)
        if not any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride(), *result.shape)):
            with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():  # whose view is the fake one
                like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                strides = view(like, result.shape).stride()
            if strides != result.stride():
                with mode:
                    return result.as_strided(result.shape, strides)
        return result

    return implementation
