"""Ops whose results have a size that depends on values, as of what a mask selects, in a capture of Dynamo's.

Dynamo takes them where a model has to be one graph. In one of several graphs it breaks before each, and AOTAutograd
fails on those that autograd adds; Dynamo handles that error by a break too.

PyTorch does not guarantee these names; 2.12 to 2.15 have them, and `tests/lowlevel/test_unknown_sizes.py` tests that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode


@contextmanager
def unknown_sizes(refusal: type[Exception]) -> Iterator[None]:
    """Within it AOTAutograd traces such ops in any of Dynamo's graphs.

    Args:
        refusal: raised within it where a size cannot stay unknown. One of several graphs breaks there for that, and
            where PyTorch itself has to know a size, as it does without this.
    """
    context = TracingContext.try_get()
    sizes = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    if sizes is None or sizes.allow_dynamic_output_shape_ops:
        yield
        return
    before = sizes.settings
    sizes.settings = replace(before, allow_dynamic_output_shape_ops=True)
    try:
        yield
    except (refusal, GuardOnDataDependentSymNode) as reason:
        raise DynamicOutputShapeException(torch.ops.aten.index.Tensor) from reason
    finally:
        sizes.settings = before
