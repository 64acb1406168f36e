"""Shoal: train deep networks in shallow memory. Convolutional networks in PyTorch, inside a byte budget."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal import codecs, errors
from shoal.core.plan import Plan
from shoal.core.version import __version__ as __version__
from shoal.errors import BudgetError, CaptureError, CodecError, InputError, PlanError, ShoalError, TransferError
from shoal.memory.cpu_allocator import use_caching_allocator
from shoal.offload.eager import offload_activations
from shoal.transforms.fuse.fuse_batchnorm import fuse_batchnorm
from shoal.transforms.invert.invert_norm import invert_norm
from shoal.transforms.split.split import split

if TYPE_CHECKING:
    from shoal import distributed
    from shoal.engine.api import compile
    from shoal.engine.fit import fit
    from shoal.engine.frontier import frontier
    from shoal.engine.options import Options
    from shoal.engine.plan import plan
    from shoal.engine.shared_budget import Budget

__all__ = [
    "Budget",
    "BudgetError",
    "CaptureError",
    "CodecError",
    "InputError",
    "Options",
    "Plan",
    "PlanError",
    "ShoalError",
    "TransferError",
    "codecs",
    "compile",
    "distributed",
    "errors",
    "fit",
    "frontier",
    "fuse_batchnorm",
    "invert_norm",
    "offload_activations",
    "plan",
    "split",
    "use_caching_allocator",
]

# Imported when they are asked for: what captures a step imports Dynamo, AOTAutograd and sympy, two seconds that a
# process which loads images, or runs an exported model, does not need.
_LATE = {
    "Budget": "shoal.engine.shared_budget",
    "Options": "shoal.engine.options",
    "compile": "shoal.engine.api",
    "fit": "shoal.engine.fit",
    "frontier": "shoal.engine.frontier",
    "plan": "shoal.engine.plan",
}
for _with_ops in ("batch_norm_vectors", "norm.joined_statistics"):  # every op of Shoal exists all the same
    import_module(f"shoal.kernels.{_with_ops}")


def __getattr__(name: str) -> Any:
    """Names that most processes never ask for are imported when they are."""
    if name in _LATE:
        found = globals()[name] = getattr(import_module(_LATE[name]), name)
        return found
    if name == "distributed":
        return import_module("shoal.distributed")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
