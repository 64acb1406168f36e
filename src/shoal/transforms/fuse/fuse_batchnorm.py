"""BN fission-n-fusion: batch norms done by the convolutions around them (Jung et al., MLSys'19, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import compiler, fx, nn

from shoal.core import arguments
from shoal.kernels.batch_norm_vectors import runs_again
from shoal.lowlevel.direct_call import needs_dispatch
from shoal.lowlevel.torch_state import has_global_hooks, has_hooks, in_transform
from shoal.transforms.fuse.eager_graph import EagerGraph
from shoal.transforms.fuse.fuse_graph import LEVELS, Level, fuse_graph, highest_level
from shoal.transforms.fuse.fusion_ops import Tracer
from shoal.transforms.fuse.fusion_size import WHENS, FusionSize, When
from shoal.transforms.fuse.fusion_summary import FusionSummary
from shoal.transforms.stand_in import Left, StandIn, check_network
from shoal.transforms.tracing import UntraceableError, trace

_MAX_INPUTS = 64  # kinds of inputs that a network remembers


def fuse_batchnorm(model: nn.Module, level: Level | None = None, *, when: When = "pays") -> FusedModule:
    """Fuse batch norms and ReLUs with the convolutions before and after them, so that fewer activations are saved.

    Replaces, in plain PyTorch, `relu(bn(conv(x)))` by a convolution that measures its result and one that normalises
    what it reads and applies the ReLU. The backward pass makes normalised tensors again. The function computed is the
    same, to rounding. Chains are found in the traced graph, never by a layer's name.

    Args:
        model: a network. Its parameters, buffers and modules are shared, not copied, under their names; so are state
            dicts and the hooks on the network itself.
        level: how much is fused (section 4 of the paper); None for all that applies.
            "rcf": a ReLU that only convolutions read is computed by them.
            "mvf": and batch norms are a measurement and a pass of ours. Saves what "rcf" does.
            "bnff": and convolutions measure their results, and normalise what they read: no normalised tensor is kept.
            "icf": and tensors that are concatenated are measured once, where they are made, and no concatenation is
            kept that only batch norms read: a dense block saves each feature map once.
        when: "pays": in eager mode, small maps run as PyTorch's own layers: calling a fused one would cost more than
            the passes it saves. Decided at every call, by the numbers of `shoal.transforms.fuse.fusion_size`, which are
            of the CPU: on a GPU all maps run as PyTorch's own layers in eager mode.
            "always": they are fused too, which saves their bytes. Under `shoal.compile` and `torch.compile` all are.

    Returns:
        A module that trains fused and in eval mode is the network itself. `summary` lists what was fused, what not
        and why; print it.

    Raises:
        InputError: no such `level` or `when`, or `model` is not a module, or fused or split already.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    >>> fused = fuse_batchnorm(net)
    >>> print(fused.summary)
    level bnff: 1 fused, 1 left
    1  statistics by 0, applied by 3
    4  left: no ReLU, convolution or residual addition follows it, but output
    >>> list(fused.state_dict()) == list(net.state_dict())
    True

    Known limits: a network that torch.fx cannot trace stays as it was, and the summary lists it; so do layers with
    hooks, subclasses of batch norm, SyncBatchNorm, activations other than ReLU, and batch norms whose input is written
    over in place. Gradients of gradients are not
    available. Under transforms of `torch.func` and forward-mode derivatives the network itself runs. Layers that are
    replaced later are found in eager mode; compile after that. What a model does by `self.training` in its own code
    stays as in training wherever anything is fused. Give the result to `shoal.compile`, not to `shoal.split` or
    `shoal.invert_norm`; of an inverted network it fuses the batch norms that stayed plain.
    """
    check_network(model, ", in which nothing is left to fuse; give the network it was made from")
    arguments.one_of("level", level, (*LEVELS, None), ", which is the highest")
    arguments.one_of("when", when, WHENS)
    return FusedModule(model, level, when)


class FusedModule(StandIn):
    """A network that trains with fused batch norms; made by `fuse_batchnorm`.

    Attributes:
        summary: what was fused, what was left and why.
    """

    made_by = "shoal.fuse_batchnorm"
    summary: FusionSummary

    def __init__(self, model: nn.Module, level: Level | None, when: When) -> None:
        super().__init__(model)
        self._wanted, self._size = level, FusionSize(when)
        self._fused: tuple[fx.GraphModule, ...] = ()
        self._fuse()

    @property
    def unfused(self) -> nn.Module:
        """The network it was made from, with the same parameters."""
        return self.source

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the network's own; fused in training mode."""
        if not self.training or in_transform():  # our ops have no rules for transforms
            return self.source.forward(*args, **kwargs)
        if self._has_other_layers() or (not compiler.is_compiling() and self._with_hooks() != self._hooked):
            self._fuse()
        if compiler.is_compiling() or not self._fused or has_global_hooks():
            return (self._fused or self._source)[0].forward(*args, **kwargs)
        kind = _kind(args) if not kwargs and not runs_again() and not needs_dispatch(args) else None
        if kind is not None and kind in self._unfused_inputs:
            return self.source.forward(*args)
        fusions = self._size.fusions
        result = self._eager(self._fused[0])(*args, **kwargs)
        if kind is not None and self._size.fusions == fusions and len(self._unfused_inputs) < _MAX_INPUTS:
            self._unfused_inputs.add(kind)
        return result

    def extra_repr(self) -> str:
        made = self.summary
        return f"level={made.level!r}, when={self._size.when!r}, {len(made.fused)} fused, {len(made.left)} left"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._unfused_inputs.clear()  # of another dtype or layout, layers may be worth their call
        return super()._apply(fn, recurse)

    def _with_hooks(self) -> list[int]:
        """Which modules inside have hooks now."""
        return [at for at, module in enumerate(self._inside) if has_hooks(module)]

    def _fuse(self) -> None:
        model = self.source
        self._remember_layers()
        self._eager = EagerGraph()
        self._unfused_inputs: set[Any] = set()  # of which all maps are too small: the network itself runs
        self._inside = tuple(model.modules())[1:]  # in a tuple, so that none is a child
        self._hooked = self._with_hooks()
        try:
            graph = trace(model, Tracer(), training=True)
        except UntraceableError as reason:
            why = Left(type(model).__name__, f"torch.fx cannot trace it: {reason}")
            self._fused, self.summary = (), FusionSummary(self._wanted or "bnff", (), (why,))
            return
        level = self._wanted or highest_level(model, graph) or "bnff"
        graph_module, summary = fuse_graph(model, graph, level, self._size)
        self._fused, self.summary = (graph_module,), summary


def _kind(args: tuple[Any, ...]) -> Any:
    """What decides whether anything is fused for these inputs; None where that is not for their sizes to say."""
    if not all(isinstance(value, torch.Tensor) for value in args):
        return None
    autocast = torch.is_autocast_enabled("cpu")
    return autocast, *((x.shape, x.stride(), x.dtype, x.device) for x in args)
