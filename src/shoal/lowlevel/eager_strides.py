"""Fake tensors with the strides, and dtypes, that PyTorch's kernels return, where its fake kernels say others.

A traced step chooses kernels and views by strides, so a wrong one in the trace becomes a copy in the step, or another
order of adding up. PyTorch computes fake results by decompositions, whose operands may come in another order than the
kernel's. And along axes of one element strides can be any number, which the two choose differently and kernels read
(`is_contiguous`, `suggest_memory_format`). docs/upstream.md has the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

_aten = torch.ops.aten
T = TypeVar("T")
Strides = tuple[int, ...]
_UNWRITTEN = "_shoal_unwritten"  # an attribute of fake tensors
Rule = Callable[[Sequence[Any], torch.Tensor], Strides | None]
_BATCH_NORM, _BATCH_NORM_BACKWARD = (
    _aten._native_batch_norm_legit_functional.default,
    _aten.native_batch_norm_backward.default,
)


class _Results(dict[Any, Any]):
    """What ops return inside the block, by op and operands' shapes, strides and dtypes, where that says it all."""

    def __setitem__(self, key: Any, entry: Any) -> None:
        if key.key[0] not in _NOT_BY_LAYOUT:
            super().__setitem__(key, entry)


_results = _Results()  # outside, PyTorch keeps its own


@contextmanager
def eager_strides() -> Iterator[None]:
    """While the block runs, fake results of aten's views, pointwise ops and norms have the strides of real ones, and
    what is written into a view is as large as the storage that is copied for it."""
    traced = FakeTensorMode._dispatch_impl

    def dispatch(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = fake_batch_norm(self, func, args, kwargs)
        return _corrected(self, func, args, kwargs, made or traced(self, func, types, args, kwargs))

    outside, FakeTensorMode.cache = FakeTensorMode.cache, _results
    FakeTensorMode._dispatch_impl = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensorMode._dispatch_impl = traced  # type: ignore[method-assign]
        FakeTensorMode.cache = outside


def _corrected(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    if func is _aten.bernoulli.p and hasattr(args[0], _UNWRITTEN):  # `empty_like(x).bernoulli_(p)`, made functional
        with mode:
            return torch.empty_like(args[0])
    if func in _CLONES_STORAGE:
        return _with_whole_storage(mode, args[0], result)
    rule = _rule(func) if isinstance(func, OpOverload) else None
    if rule is None or result is NotImplemented or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return result
    if isinstance(result, tuple):
        if func in _SAVES_STATISTICS:
            result = _with_wide_statistics(mode, args, result)
        n_like = _N_ALIKE.get(func, 1)
        return (*(_corrected_one(mode, func, rule, args, value) for value in result[:n_like]), *result[n_like:])
    corrected = _corrected_one(mode, func, rule, args, result)
    if func is _aten.empty_like.default:
        setattr(corrected, _UNWRITTEN, True)
    return corrected


def _corrected_one(mode: FakeTensorMode, func: OpOverload, rule: Rule, args: Sequence[Any], result: Any) -> Any:
    tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
    symbolic = any(isinstance(size, torch.SymInt) for x in tensors for size in (*x.shape, *x.stride()))
    if result is None or symbolic:
        return result
    strides = rule(args, result)
    if strides is None or strides == result.stride():
        return result
    with mode:
        if func in _VIEWS:
            return result.as_strided(result.shape, strides)
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def _with_wide_statistics(mode: FakeTensorMode, args: Sequence[Any], result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The CPU saves a half-precision batch's mean and inverse deviation in float32, where a parameter is float32."""
    x, mean, invstd = args[0], *result[1:3]
    others = [value for value in args[1:] if isinstance(value, torch.Tensor)]
    if x.device.type != "cpu" or x.dtype == torch.float32 or all(t.dtype != torch.float32 for t in others):
        return result
    with mode:
        wide = [torch.empty_like(saved, dtype=torch.float32) for saved in (mean, invstd)]
    return (result[0], *wide, *result[3:])


def _with_whole_storage(mode: FakeTensorMode, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A copy of what `x` is a view of, of all its bytes, where the fake kernel copies up to the view's last element."""
    nbytes = x.untyped_storage().nbytes()
    sizes = (nbytes, x.storage_offset(), *x.shape, *x.stride())
    if any(isinstance(size, torch.SymInt) for size in sizes) or result.stride() != x.stride():
        return result
    if result.untyped_storage().nbytes() >= nbytes:
        return result
    with mode:
        whole = torch.empty(nbytes // x.element_size(), dtype=x.dtype, device=x.device)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())


@cache
def _rule(func: OpOverload) -> Rule | None:
    """What tells an op's strides from its arguments and its fake result; None where the fake kernel tells them."""
    if func in _VIEWS:
        return lambda args, result: _viewed(func, args[0], result.shape)
    if func in _RESHAPING:
        return lambda args, result: _in_format(args[0], result.shape) if result.device.type == "cpu" else None
    if func in _LIKE:
        place, like = _LIKE[func]

        def alike(args: Sequence[Any], result: torch.Tensor) -> Strides | None:
            if result.device.type != "cpu" or result.shape != args[place].shape:  # a loss may be one number
                return None
            return like(args[place])

        return alike
    places = _operands(func)
    if not places:
        return None
    return lambda args, result: iterated_strides(*(args[place] for place in places if place < len(args)))


def _operands(func: OpOverload) -> Sequence[int]:
    """The places of the arguments that an op's kernel gives to TensorIterator, in its order; none where it does not."""
    if func in _OPERANDS:
        return _OPERANDS[func]
    if torch.Tag.pointwise not in func.tags or func in _OTHERWISE or func._schema.is_mutable or func.is_view:
        return ()
    kinds = {"Tensor", "number"} if func._overloadname == "Scalar" else {"Tensor"}
    return [place for place, argument in enumerate(func._schema.arguments) if str(argument.type) in kinds]


def _viewed(view: OpOverload, x: torch.Tensor, shape: Sequence[int]) -> Strides:
    with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():  # whose view is the fake one
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        strides: Strides = view(like, shape).stride()
        return strides


def iterated_strides(*operands: torch.Tensor | float) -> Strides:
    """The strides of what a kernel computes by TensorIterator, of `operands` in the order that it gives them.

    It is `TensorIteratorBase::build` of ATen (aten/src/ATen/TensorIterator.cpp), where no output is given.

    >>> x, y = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    >>> iterated_strides(x, y), iterated_strides(y, x), iterated_strides(x[:, :, :1, :1], y)
    ((60, 20, 5, 1), (60, 1, 15, 3), (60, 1, 15, 3))
    """
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    if all(x.shape == shape for x in tensors) and (len(tensors) == len(operands) or not shape):
        if all(x.is_contiguous() for x in tensors):
            return _dense(shape, range(len(shape) - 1, -1, -1))
        if len(shape) == 4 and all(x.is_contiguous(memory_format=torch.channels_last) for x in tensors):
            return _dense(shape, (1, 3, 2, 0))
        strides = tensors[0].stride()
        if is_dense(shape, strides) and all(x.stride() == strides for x in tensors):
            return strides
    return _dense(shape, _innermost_first(shape, [_expanded(x, shape) for x in tensors]))


def _dense(shape: Sequence[int], innermost_first: Sequence[int]) -> Strides:
    strides, step = [0] * len(shape), 1
    for dim in innermost_first:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _expanded(x: torch.Tensor, shape: Sequence[int]) -> Strides:
    """Strides of `x` as an operand of that shape: 0 along what is broadcast."""
    missing = len(shape) - x.dim()
    own = zip(x.shape, x.stride(), shape[missing:], strict=True)
    return (*[0] * missing, *(0 if size == 1 and full != 1 else stride for size, stride, full in own))


def _innermost_first(shape: Sequence[int], operands: Sequence[Strides]) -> list[int]:
    """The dimensions in memory order, innermost first; earlier operands decide first."""
    order = list(range(len(shape) - 1, -1, -1))

    def is_further(one: int, other: int) -> bool | None:
        for strides in operands:
            if not strides[one] or not strides[other]:
                continue
            if strides[one] != strides[other]:
                return strides[one] > strides[other]
            if shape[one] > shape[other]:
                return True
        return None

    for place in range(1, len(order)):
        for before in range(place - 1, -1, -1):
            further = is_further(order[before], order[place])
            if further:
                order[before], order[place] = order[place], order[before]
                place = before
            elif further is not None:
                break
    return order


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor fills its storage and no two elements share an address."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def _contiguous(x: torch.Tensor) -> Strides:
    return _dense(x.shape, range(x.dim() - 1, -1, -1))


def _in_format(x: torch.Tensor, shape: Sequence[int] | None = None) -> Strides:
    return torch.empty(
        x.shape if shape is None else shape, memory_format=suggest_memory_format(x), device="meta"
    ).stride()


def _normalised(x: torch.Tensor) -> Strides:
    """As batch norm does: contiguous where `x` is, else channels_last where `x` is, whatever an axis of one says."""
    if x.is_contiguous():
        return _contiguous(x)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return _dense(x.shape, (1, 3, 2, 0))
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return _dense(x.shape, (1, 4, 3, 2, 0))
    return _in_format(x)


def _normalised_back(x: torch.Tensor) -> Strides:
    suggested = suggest_memory_format(x)
    return _normalised(x) if suggested is torch.contiguous_format else _in_format(x)


def _preserved(x: torch.Tensor) -> Strides:
    """As `torch.preserve_format` does."""
    return x.stride() if is_dense(x.shape, x.stride()) else iterated_strides(x)


def _ops(names: str) -> tuple[OpOverload, ...]:
    """The ops of aten with these names, separated by spaces; "default" where a name has no overload."""
    parts = (name.partition(".") for name in names.split())
    return tuple(getattr(getattr(_aten, packet), overload or "default") for packet, _, overload in parts)


def _by_op(rows: Mapping[str, T]) -> dict[OpOverload, T]:
    return {op: value for names, value in rows.items() for op in _ops(names)}


_VIEWS = _ops("view _unsafe_view")
# Where they are not all the tensors among the arguments in their order, or the op is not tagged as pointwise.
_OPERANDS: Mapping[OpOverload, tuple[int, ...]] = _by_op(
    {
        "hardsigmoid_backward hardswish_backward hardtanh_backward mish_backward softplus_backward": (0, 1),
        "elu_backward": (0, 5),
        "leaky_relu_backward threshold_backward": (1, 0),
        "_prelu_kernel_backward": (1, 2, 0),
    }
)
# Kernels of the CPU without TensorIterator: the place of the argument that the first result is laid out like, and how.
_LIKE: Mapping[OpOverload, tuple[int, Callable[[torch.Tensor], Strides]]] = _by_op(
    {
        "_native_batch_norm_legit_functional _native_batch_norm_legit.no_stats": (0, _normalised),
        "_native_batch_norm_legit_no_training": (0, _normalised),
        "native_batch_norm_backward": (1, _normalised_back),
        "native_group_norm roll": (0, _in_format),
        "native_group_norm_backward reflection_pad2d_backward reflection_pad3d_backward": (1, _in_format),
        "replication_pad2d_backward replication_pad3d_backward": (1, _in_format),
        "native_layer_norm _log_softmax _log_softmax_backward_data log_sigmoid_forward": (0, _contiguous),
        "native_layer_norm_backward glu_backward": (1, _contiguous),
        "huber_loss_backward mse_loss_backward smooth_l1_loss_backward": (1, _contiguous),
        "binary_cross_entropy hardtanh _prelu_kernel _to_copy": (0, _preserved),
        "empty_like zeros_like ones_like full_like rand_like randn_like": (0, _preserved),
    }
)
_SAVES_STATISTICS = _ops(
    "_native_batch_norm_legit_functional _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training"
    " native_group_norm native_layer_norm"
)
# Laid out in the memory format of their first argument, in a shape of their own; 2.12 needs it for 2d, too.
_RESHAPING = _ops("reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d")
_N_ALIKE = _by_op({"log_sigmoid_forward _prelu_kernel_backward": 2})  # results, where not one
# Tagged as pointwise, but not one pass of TensorIterator over the arguments.
_OTHERWISE = _ops(
    "_conj_physical clone deg2rad ldexp.Tensor masked_fill.Scalar masked_fill.Tensor mvlgamma nan_to_num pow.Scalar"
    " rad2deg"
)
# They copy the storage that an operand is a view of.
_CLONES_STORAGE = _ops("as_strided_scatter copy diagonal_scatter select_scatter slice_scatter")
# What they return depends on `_UNWRITTEN`, or on that storage.
_NOT_BY_LAYOUT = (*_ops("empty_like bernoulli.p"), *_CLONES_STORAGE)


def fake_batch_norm(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the fake kernel returns for batch norm in training mode; None for any other op, and where it has to say.

    PyTorch's fake kernel takes it apart into about twenty ops, each of which is dispatched: a sixth of the time in
    which a convolutional network is traced. What it comes to follows from the operands, where they are laid out in
    one way only.

    Args:
        mode: of the operands.
        func, args, kwargs: the op as it is dispatched.
    """
    if kwargs or func not in (_BATCH_NORM, _BATCH_NORM_BACKWARD):
        return None
    if func is _BATCH_NORM:
        x, *vectors, trains = args[:6]
        n_results, with_all = 5, trains
    else:
        grad, x, weight, _, _, mean, invstd, trains, _, asked = args
        vectors = [weight, mean, invstd]
        n_results, with_all = 3, trains and all(asked) and grad.shape == x.shape and grad.stride() == x.stride()
        with_all = with_all and (grad.dtype, grad.device) == (x.dtype, x.device)
    if not (with_all and _has_one_layout(x) and all(_is_vector_of(x, vector) for vector in vectors)):
        return None
    with mode:
        first = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return (first, *(torch.empty_like(vectors[0]) for _ in range(n_results - 1)))


def _has_one_layout(x: torch.Tensor) -> bool:
    """Whether no axis could have another stride: contiguous or channels_last, and no axis of one."""
    if x.dtype not in (torch.float32, torch.float64) or not 2 <= x.dim() <= 5:
        return False
    if any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride())) or min(x.shape) <= 1:
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.is_contiguous() or x.is_contiguous(memory_format=last)


def _is_vector_of(x: torch.Tensor, vector: torch.Tensor | None) -> bool:
    return (
        vector is not None
        and (vector.dtype, vector.device, vector.shape) == (x.dtype, x.device, x.shape[1:2])
        and vector.is_contiguous()
    )
