"""Random tensors in place of a captured node's fake tensors, so that the node can run in isolation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from shoal.graph.fx_nodes import per_axis
from shoal.graph.op_counts import concrete
from shoal.lowlevel.torch_state import negated_view

_aten = torch.ops.aten
_PATTERN_ELEMS = (1 << 20) - 3  # not a power of two, so that rows of a tensor differ
_SEED = 20_24
_CORE_CACHE_BYTES = 2 << 20  # of the L2 cache of a core, at most
_MAX_SHARED_CACHE_BYTES = 64 << 20  # of the L3 cache: to go through more takes too long
_SHARED_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_POOLS = {_aten.max_pool2d_with_indices.default: 2, _aten.max_pool3d_with_indices.default: 3}
_KNOWN = ("aten", "prims", "shoal")  # namespaces of ops
_WRITING = (_aten.index_put, _aten.index_put_, _aten._unsafe_index_put)
_INDEXING = (_aten.index, _aten._unsafe_index, *_WRITING)
_BAGS = (_aten._embedding_bag, _aten._embedding_bag_forward_only)
_BAGS_BACKWARD = (_aten._embedding_bag_backward, _aten._embedding_bag_dense_backward)
_ASSERTIONS = (_aten._assert_async, _aten._functional_assert_async)
# Ops that read a probability, a rate, a deviation or a flag, of which 0 is one: PyTorch's, and ours in their place.
_OF_PROBABILITIES = (
    *("binary_cross_entropy", "bernoulli", "binomial", "poisson", "normal"),
    "multilabel_margin_loss_backward",
)
_POOL_BACKWARDS = {_aten.max_pool2d_with_indices_backward.default: 2, _aten.max_pool3d_with_indices_backward.default: 3}


class OperandFactory:
    """Makes the arguments of nodes on one device, with a random generator of its own.

    Floats are standard normal; one-dimensional ones (variances, scales) are above 0.5. Booleans are random, but a mask
    among indices selects what the other operands are for, and what is asserted holds: on CUDA an assertion that fails
    ends the process's use of the device. Probabilities, and flags that are floats, are 0. Integers are valid for the
    op: indices in their windows for max pooling, classes for losses, rows for embeddings, bags of equal sizes, else 0:
    what is scratch for those that are not empty would be missed with empty ones. Operands of another
    library's op are all 0: what its numbers say is unknown, and places among floats, as of torchvision's `roi_align`,
    are written to unchecked. Sizes, strides, dtypes and lazy conjugations and negations are those of the fake tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(_SEED)
        self._patterns: dict[torch.dtype, torch.Tensor] = {}
        self._others: dict[bool, torch.Tensor] = {}

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments to call `node.target` with; the same node gives the same tensor."""
        made: dict[fx.Node, Any] = {}
        zeros = _is_of_others(node) or getattr(node.target, "__name__", "").partition(".")[0] in _OF_PROBABILITIES

        def materialise(operand: fx.Node) -> Any:
            if operand not in made:
                fill = _integers_for(node, operand)
                made[operand] = tree_map(lambda leaf: self._leaf(leaf, fill, zeros=zeros), operand.meta.get("val"))
            return made[operand]

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), materialise)
        args, kwargs = tree_map(concrete, (tuple(args), dict(kwargs)))
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = self.device
        return tuple(args), kwargs

    @property
    def shared_bytes(self) -> int:
        """Of the cache that the cores share, at most 64 MiB."""
        return _shared_cache_bytes()

    def evict(self, *, shared: bool = False) -> None:
        """Move what was used last out of the cores' own caches.

        Args:
            shared: out of the cache that they share as well, up to 64 MiB of it.
        """
        if shared not in self._others:
            nbytes = _shared_cache_bytes() if shared else _CORE_CACHE_BYTES * torch.get_num_threads()
            self._others[shared] = torch.ones(nbytes // 4)
        if shared:
            self._others[shared].sum()  # to read is enough, and takes half as long
        else:
            self._others[shared].add_(1)

    def _leaf(self, leaf: Any, fill: Callable[[torch.Tensor], None] | None, *, zeros: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return concrete(leaf)
        shape = [int(size) for size in leaf.shape]
        strides = [int(stride) for stride in leaf.stride()]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else 0
        block = torch.empty(extent, dtype=leaf.dtype, device=self.device)
        if zeros:
            block.zero_()
        else:
            self._fill(block, positive=len(shape) == 1)
        tensor = block.as_strided(shape, strides)
        if fill is not None and not leaf.dtype.is_floating_point and 0 not in strides:
            fill(tensor)
        tensor = tensor.conj() if leaf.is_conj() else tensor
        return negated_view(tensor) if leaf.is_neg() else tensor

    def _fill(self, block: torch.Tensor, positive: bool) -> None:
        if not (block.dtype.is_floating_point or block.dtype.is_complex or block.dtype is torch.bool):
            block.zero_()
            return
        # Sampling every element would take longer than most ops: one block of random numbers is repeated.
        pattern = self._pattern(block.dtype)
        whole = block.numel() // _PATTERN_ELEMS * _PATTERN_ELEMS
        block[:whole].view(-1, _PATTERN_ELEMS).copy_(pattern.expand(whole // _PATTERN_ELEMS, -1))
        block[whole:].copy_(pattern[: block.numel() - whole])
        if positive and block.dtype.is_floating_point:
            block.abs_().add_(0.5)

    def _pattern(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._patterns:
            normal = torch.randn(_PATTERN_ELEMS, generator=self._generator, device=self.device)
            self._patterns[dtype] = normal > 0 if dtype is torch.bool else normal.to(dtype)
        return self._patterns[dtype]


@cache
def _shared_cache_bytes() -> int:
    try:
        kibibytes = int(_SHARED_CACHE.read_text().strip().removesuffix("K"))
    except (OSError, ValueError):  # no such cache, or not on Linux
        return _MAX_SHARED_CACHE_BYTES // 2
    return min(kibibytes << 10, _MAX_SHARED_CACHE_BYTES)


def _is_of_others(node: fx.Node) -> bool:
    """Whether the op is neither PyTorch's nor ours."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _KNOWN


def _integers_for(node: fx.Node, operand: fx.Node) -> Callable[[torch.Tensor], None] | None:
    """A function that fills `operand` with integers that are valid for `node`; None for zeros."""
    if getattr(node.target, "overloadpacket", None) in _ASSERTIONS:
        return _holding
    pool = operand.args[0] if _is_getitem(operand, 1) else None
    if isinstance(pool, fx.Node) and pool.target in _POOLS:
        return _first_places(_pool_arguments(pool, 0), _POOLS[pool.target])
    if node.target in _POOL_BACKWARDS and operand is node.args[-1]:
        return _first_places(_pool_arguments(node, 1), _POOL_BACKWARDS[node.target])
    if getattr(node.target, "overloadpacket", None) in (*_BAGS, *_BAGS_BACKWARD):
        return _of_bags(node, operand)
    selected = _selected(node, operand)
    if selected is not None:
        return _selecting(selected)
    bound = _bound(node, operand)
    return None if bound is None else lambda tensor: _count_up(tensor, bound)


def _of_bags(node: fx.Node, operand: fx.Node) -> Callable[[torch.Tensor], None] | None:
    """As `_integers_for`, where rows of a table are added up bag by bag."""
    target: Any = node.target
    args = dict(zip((one.name for one in target._schema.arguments), node.args, strict=False))
    if operand is args["indices"]:
        n_rows = args["num_weights"] if "num_weights" in args else _shape(args["weight"])[0]
        return lambda tensor: _count_up(tensor, int(concrete(n_rows)))
    if operand is args.get("bag_size"):
        return _holding
    n_indices = _shape(args["indices"])[0]

    def begin_evenly(tensor: torch.Tensor) -> None:
        tensor.copy_(torch.arange(tensor.numel(), device=tensor.device) * n_indices // max(tensor.numel(), 1))

    return begin_evenly if operand is args.get("offsets") else None


def _selected(node: fx.Node, operand: fx.Node) -> int | None:
    """How many places a mask selects among the indices of `node`, where its other operands say that."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _INDEXING or operand.meta["val"].dtype is not torch.bool:
        return None
    indices: Any = node.args[1]
    if operand not in indices:
        return None
    places = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    others = [index.meta["val"].numel() for _, index in places if index.meta["val"].dtype is not torch.bool]
    if others:
        return int(concrete(max(others)))
    values = node.args[2] if packet in _WRITING else node
    n_dims = len(_shape(node.args[0])) - len(_shape(operand)) + 1
    is_whole = isinstance(values, fx.Node) and len(_shape(values)) == n_dims
    return _shape(values)[places[0][0]] if is_whole else None


def _selecting(n: int) -> Callable[[torch.Tensor], None]:
    """The first `n` places of a mask."""

    def fill(mask: torch.Tensor) -> None:
        mask.copy_((torch.arange(mask.numel(), device=mask.device) < n).view(mask.shape))

    return fill


def _bound(node: fx.Node, operand: fx.Node) -> int | None:
    packet = getattr(node.target, "overloadpacket", None)
    args = node.args
    if packet in (_aten.nll_loss_forward, _aten.nll_loss2d_forward) and operand is args[1]:
        return _shape(args[0])[-1 if len(_shape(args[0])) == 1 else 1]
    if packet in (_aten.nll_loss_backward, _aten.nll_loss2d_backward) and operand is args[2]:
        return _shape(args[1])[-1 if len(_shape(args[1])) == 1 else 1]
    if packet is _aten.embedding and operand is args[1]:
        return _shape(args[0])[0]
    if packet is _aten.embedding_dense_backward and operand is args[1]:
        return int(concrete(args[2]))
    return None


def _pool_arguments(pool: fx.Node, first: int) -> tuple[list[int], Any, Any, Any]:
    options = [*pool.args[first + 1 : first + 4], None, None, None]
    return _shape(pool.args[first]), options[0], options[1], options[2]


def _first_places(pool: tuple[list[int], Any, Any, Any], dims: int) -> Callable[[torch.Tensor], None]:
    """The indices that max pooling returns if the first element of each window is its maximum."""
    shape, kernel, stride, padding = pool
    extents = shape[-dims:]
    steps = per_axis(stride or kernel, dims)
    paddings = per_axis(padding or [0], dims)

    def fill(indices: torch.Tensor) -> None:
        places = torch.zeros((), dtype=torch.int64, device=indices.device)
        for axis, (extent, step, pad) in enumerate(zip(extents, steps, paddings, strict=True)):
            starts = torch.arange(indices.shape[axis - dims], device=indices.device) * step - pad
            places = places.unsqueeze(-1) * extent + starts.clamp_(0, extent - 1)
        indices.copy_(places)

    return fill


def _holding(tensor: torch.Tensor) -> None:
    tensor.fill_(1)


def _count_up(tensor: torch.Tensor, bound: int) -> None:
    tensor.copy_((torch.arange(tensor.numel(), device=tensor.device) % max(bound, 1)).view(tensor.shape))


def _is_getitem(node: fx.Node, place: int) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and node.args[1:] == (place,)


def _shape(node: Any) -> list[int]:
    return [int(size) for size in node.meta["val"].shape]
