"""Shoal: train deep networks in shallow memory. Convolutional networks in PyTorch, inside a byte budget."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal import codecs
from shoal.core.plan import Plan
from shoal.core.version import __version__ as __version__
from shoal.engine.api import compile
from shoal.engine.lossy_report import lossy_report
from shoal.engine.plan import plan
from shoal.errors import BudgetError, CaptureError, CodecError, InputError, PlanError, ShoalError, TransferError
from shoal.offload.eager import offload_activations
from shoal.transforms.fuse.fuse_batchnorm import fuse_batchnorm
from shoal.transforms.invert.invert_batchnorm import invert_batchnorm, restore_batchnorm
from shoal.transforms.split.split import split

if TYPE_CHECKING:
    from shoal import distributed

__all__ = [
    "BudgetError",
    "CaptureError",
    "CodecError",
    "InputError",
    "Plan",
    "PlanError",
    "ShoalError",
    "TransferError",
    "codecs",
    "compile",
    "distributed",
    "fuse_batchnorm",
    "invert_batchnorm",
    "lossy_report",
    "offload_activations",
    "plan",
    "restore_batchnorm",
    "split",
]


def __getattr__(name: str) -> Any:
    """`shoal.distributed`, which most programs never ask for, is imported when it is."""
    if name == "distributed":
        return import_module("shoal.distributed")
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
