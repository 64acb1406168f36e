"""Norms and their activations in the invertible form, and back (In-Place ABN; section 3 of CPU offloading)."""

from __future__ import annotations

from torch import fx, nn

from shoal.core import arguments
from shoal.errors import InputError, brief
from shoal.lowlevel.torch_state import has_hooks
from shoal.transforms.invert.inverted_graph import NORMS, find
from shoal.transforms.invert.inverted_model import InvertedModel, limit_of
from shoal.transforms.stand_in import StandIn, check_network
from shoal.transforms.tracing import traced


def invert_norm(model: nn.Module, slope: float | None = 0.01, *, limit: float | None = None) -> InvertedModel:
    """Make norms and the activations after them one op that saves only its result.

    Replaces, in plain PyTorch, In-Place ABN's layers written into the network by hand. PyTorch saves the input of every
    norm for its backward pass, in addition to the result of the activation; the inverted form makes that input again
    from the result, which the next convolution saves anyway. Found by structure: a batch, instance or group norm, in
    one to three spatial dimensions, whose only reader is a LeakyReLU, ELU or ReLU.

    An instance or group norm with a LeakyReLU or ELU stays the same function, to rounding, and so do its parameters;
    only a scale nearer to zero than 1e-5 is taken for 1e-5, on its side. Two things change a function:

    - a ReLU has no inverse, so it becomes a LeakyReLU of `slope`; with `slope=None` norms with a ReLU are left;
    - the scales of batch norms stay at least eps away from zero, on their side. Weights are moved towards zero by eps,
      so that the scales are those the network has; `restore` moves them back.

    Args:
        model: a network that torch.fx can trace. Its parameters, buffers and modules are shared, not copied, under
            their names; so are state dicts and the hooks on the network itself.
        slope: what becomes of a ReLU below zero, more than 0; None to leave ReLUs and their norms as they are.
            LeakyReLU and ELU stay what they are.
        limit: the most that a normalised input, of variance 1, may be off when it is made again in float32; None for
            any. For trained models, whose channels may have scales near zero.

    Returns:
        A module that computes the converted network, in training and in eval mode; `describe()` lists what was
        converted, what was not and why; `restore()` makes it a network of plain norms again.

    Raises:
        InputError: an argument is out of range, a channel is over the limit, or a module whose call is taken apart has
            hooks; layers and channels are named.
        CaptureError: torch.fx cannot trace the model.

    >>> net = nn.Sequential(nn.Conv3d(1, 8, 3), nn.InstanceNorm3d(8), nn.LeakyReLU(), nn.Conv3d(8, 8, 3),
    ...                     nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv3d(8, 8, 3), nn.BatchNorm3d(8))
    >>> inverted = invert_norm(net)
    >>> print(inverted.describe())
    2 of 3 norms inverted
    layer  was                           now              inexact to
    1      InstanceNorm3d and LeakyReLU  LeakyReLU(0.01)  3e-06
    4      GroupNorm and ReLU            LeakyReLU(0.01)  3e-06
    7  kept: its result is the network's, there is no activation after it
    >>> list(inverted.state_dict()) == list(net.state_dict())
    True

    Limits: use the result, and no longer `model`, whose own forward pass has other scales by eps where batch norms were
    converted. Replace layers of the network before it is inverted, not after: the result refuses to run then. Hooks
    that are put on converted norms and activations later do not run. In half precision the result holds fewer digits to
    make the input from; `reconstruction_errors(torch.bfloat16)` gives how few. ELU flattens out: below about -10 little
    can be made again. Instance norms with running statistics, layer norms and PReLUs, whose slope is learned, are left.
    No double backward. Invert first: `shoal.fuse_batchnorm` and `shoal.split` take the result. `shoal.compile(...,
    allow="exact, invert")` inverts instance and group norms where that trains faster inside the budget, without a
    change of the model.
    """
    if isinstance(model, InvertedModel):
        raise InputError("the model is inverted already; give the network it was made from, or restore it first")
    check_network(model, "; invert the network first, and give that to {made_by}")
    if slope is not None and not (arguments.is_number(slope) and slope > 0):
        raise InputError(
            f"slope={brief(slope)}: expected a number more than 0, such as 0.01, or None to leave ReLUs; a slope of 0 "
            "has no inverse"
        )
    limit = limit_of(limit)
    graphs = [
        traced(model, _InvertNormTracer(), training=training, instead="convert a part of it")
        for training in (True, False)
    ]
    modules = dict(model.named_modules(remove_duplicate=False))
    sites, left = find(graphs, modules, slope)
    _refuse_hooks(model)
    found = InvertedModel(model, graphs, sites, left)
    try:
        found.refuse_inexact(limit)
    except InputError:
        found.give_weights_back()
        raise
    return found


class _InvertNormTracer(fx.Tracer):
    """Leaves norms of other libraries whole, and what a transform returned."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*NORMS, StandIn)) or super().is_leaf_module(m, module_qualified_name)


def _refuse_hooks(model: nn.Module) -> None:
    is_whole = _InvertNormTracer().is_leaf_module
    for name, module in model.named_modules():
        if name and not is_whole(module, name) and has_hooks(module):
            raise InputError(
                f"{name} has hooks, which do not run in a converted network; remove them, or "
                "convert the parts before and after it"
            )
