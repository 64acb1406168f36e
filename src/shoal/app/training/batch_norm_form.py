"""The form in which a network's batch norms run, by name: for commands."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal import fuse_batchnorm, invert_norm
from shoal.errors import InputError
from shoal.transforms.fuse.fuse_batchnorm import FusedModule
from shoal.transforms.fuse.fuse_graph import LEVELS
from shoal.transforms.invert.inverted_model import InvertedModel

FORMS = ("fused", *LEVELS, "inverted")


def check_form(form: str | None) -> None:
    """Raises InputError where there is no such form; None is the network as it is."""
    if form is not None and form not in FORMS:
        raise InputError(f"--batch-norm {form}: expected one of {', '.join(FORMS)}")


def in_form(model: nn.Module, form: str | None) -> FusedModule | InvertedModel | nn.Module:
    """The network as it is (None), `shoal.fuse_batchnorm` of it ("fused", or a level) or `shoal.invert_norm`.

    >>> in_form(nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()), "inverted").describe().splitlines()[0]
    '1 of 1 norms inverted'
    """
    check_form(form)
    if form is None:
        return model
    level: Any = None if form == "fused" else form
    return invert_norm(model) if form == "inverted" else fuse_batchnorm(model, level)


def described(model: nn.Module) -> str:
    """One line for what `in_form` returned: how many batch norms have that form; empty for any other network."""
    if isinstance(model, FusedModule):
        return f"fuse_batchnorm, {str(model.summary).splitlines()[0]}"
    return model.describe().splitlines()[0] if isinstance(model, InvertedModel) else ""
