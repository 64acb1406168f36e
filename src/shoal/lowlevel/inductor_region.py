"""Small graphs compiled by Inductor, each by itself: C++ on the CPU, Triton on CUDA.

The code of many graphs is written one after another while the compilers of those before still run, as many at once as
Inductor has workers. Inductor keeps what it compiles on disk, by content, for every process.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

log = logging.getLogger("shoal")

Boxed = Callable[[list[Any]], Sequence[torch.Tensor]]
_aten = torch.ops.aten
_LANES = 16  # sums of neighbours in memory are that many chains
_SHORT_CHAIN = 64  # additions one after another, as few as in a row of a layer norm or of a softmax


@lru_cache
def missing_compiler(device_type: str) -> str:
    """What Inductor lacks for code of a device; "" where it can compile."""
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton is not installed, or does not know this GPU"
    if device_type != "cpu":
        return f"there is no compiler for {device_type}"
    from torch._inductor import config

    named = config.cpp.cxx
    names = [name for name in (named if isinstance(named, (tuple, list)) else (named,)) if name]
    found = any(shutil.which(name) for name in (*names, os.environ.get("CXX", "g++"), "g++", "clang++"))
    return "" if found else "no C++ compiler is found (CXX names one)"


def in_primitive_ops(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """A function of tensors as the graph of the ops that Inductor compiles.

    Args:
        function: takes the inputs, returns tensors.
        inputs: fake tensors; only shape, strides, dtype and device count.

    Returns:
        The graph, and inputs of it that are fake in a mode of their own.
    """
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), **wide_sums(inputs[0].device.type)}
    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one Inductor looks for nothing in its cache
    with unset_fake_temporarily(), tracing(None), torch.no_grad(), mode:
        fakes = tuple(torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device) for x in inputs)
        module = make_fx(lambda *own: tuple(function(*own)), decomposition_table=table)(*fakes)
    return module, fakes


def compile_each(graphs: Sequence[tuple[fx.GraphModule, Sequence[torch.Tensor]]]) -> list[Boxed | Exception]:
    """Each graph compiled, or why it could not be.

    Args:
        graphs: as of `in_primitive_ops`.

    Returns:
        Callables that take a list of tensors, which they empty, and return new tensors, laid out as in the graph.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch.compiler import config as cache_config

    begun: list[tuple[AsyncCompile, dict[str, Any]]] = []
    wait = AsyncCompile.wait

    def wait_later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        begun.append((self, scope))

    compiled: list[Any] = []
    with _settings(), unset_fake_temporarily(), torch.no_grad():
        for module, inputs in graphs:
            begun.clear()
            try:
                _keep_layouts(module)
                mode: Any = inputs[0].fake_mode  # type: ignore[attr-defined]
                # The graph's own text has no layouts. Its C++ has loops of as many elements as the processor's vectors
                # have: compiled where vectors are shorter (another node of a cluster), it skips elements.
                vectors = pick_vec_isa() if inputs[0].device.type == "cpu" else ""
                tag = f"shoal {[value.stride() for value in _results(module)]} {vectors}"
                with (
                    cache_config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
                    tracing(TracingContext(mode)),
                    mode,
                    mock.patch.object(AsyncCompile, "wait", wait_later),
                ):
                    compiled.append((compile_fx_inner(module, list(inputs)), list(begun)))
            except Exception as error:  # of whatever Inductor meets in the graph
                compiled.append(error)
        for place, one in enumerate(compiled):
            if isinstance(one, Exception):
                continue
            call, pending = one
            try:
                for waiting, scope in pending:
                    wait(waiting, scope)
                compiled[place] = call
            except Exception as error:  # of the compiler that Inductor calls
                compiled[place] = error
    return compiled


def code_of(compiled: Boxed) -> Boxed:
    """The generated code of what `compile_each` returned, without Inductor's object around it.

    At each call that object looks for profilers and for caches of autotuning that the first call is to fill, for as
    long as a small region takes. It stays where there are such caches.
    """
    if getattr(compiled, "_compile_context", None) is not None:
        return compiled
    code: Boxed = getattr(compiled, "current_callable", None) or compiled
    return code


@contextmanager
def _settings() -> Iterator[None]:
    from torch._inductor import config

    changed: dict[str, Any] = {
        "fallback_random": True,
        "size_asserts": False,  # shapes and strides are those of the plan
        "nan_asserts": False,
        "triton.cudagraphs": False,
        "max_autotune": False,
        "freezing": False,
        "cpp_wrapper": False,
    }
    for name in ("alignment_asserts", "scalar_asserts"):
        if hasattr(config, name):
            changed[name] = False
    with config.patch(**changed):
        yield


def _keep_layouts(module: fx.GraphModule) -> None:
    """Results get the strides of the graph, whatever would be faster."""
    meta = module.graph.output_node().meta
    values = _results(module)
    meta["user_visible_output_idxs"] = list(range(len(values)))
    meta["original_output_strides"] = [value.stride() for value in values]


def _results(module: fx.GraphModule) -> list[torch.Tensor]:
    results: Any = module.graph.output_node().args[0]
    return [node.meta["val"] for node in results]


def wide_sums(device_type: str) -> dict[Any, Callable[..., Any]]:
    """Op → what computes it with sums in float64; empty where they stay as they are.

    Eager PyTorch's batch norm adds in float64 on the CPU. Inductor's loops add in the dtype of the result, in a few
    long chains: in float32 that is up to sixty times the error of eager PyTorch, which adds in pairs or in float64.
    On CUDA, where float64 is slow and a sum is a tree of short chains, everything stays as it is.

    Args:
        device_type: where the tensors are.
    """
    if device_type != "cpu":
        return {}
    return {
        _aten.sum.default: _sum,
        _aten.sum.dim_IntList: _sum,
        _aten.mean.default: _mean,
        _aten.mean.dim: _mean,
        _aten.var_mean.correction: _var_mean,
        _aten.var.correction: _var,
    }


def _stays(x: torch.Tensor, dim: Sequence[int] | None) -> bool:
    """Whether a reduction over some axes is exact enough as Inductor makes it."""
    if x.dtype is torch.float64 or not x.dtype.is_floating_point:
        return True
    axes = _axes(x, dim)
    lanes = _LANES if any(x.stride(axis) == 1 for axis in axes) else 1
    return _count(x, axes) <= lanes * _SHORT_CHAIN


def _axes(x: torch.Tensor, dim: Sequence[int] | None) -> list[int]:
    return list(dim) if dim else list(range(x.dim()))


def _count(x: torch.Tensor, axes: Sequence[int]) -> int:
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return count


def _sum(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    wanted = dtype or x.dtype
    if _stays(x, dim) or not wanted.is_floating_point:
        return NotImplemented
    return _aten.sum.dim_IntList(x.double(), _axes(x, dim), keepdim).to(wanted)


def _mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if _stays(x, dim):
        return NotImplemented
    axes = _axes(x, dim)
    total = _aten.sum.dim_IntList(x.double(), axes, keepdim)
    return (total / _count(x, axes)).to(dtype or x.dtype)


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    if _stays(x, dim):
        return NotImplemented
    # In one sweep: of numbers in float32, squares in float64 lose nothing that the numbers had.
    wide, axes = x.double(), _axes(x, dim)
    count = _count(x, axes)
    mean = _aten.sum.dim_IntList(wide, axes, keepdim) / count
    squares = (_aten.sum.dim_IntList(wide * wide, axes, keepdim) - count * mean * mean).clamp_min(0.0)
    var = squares / max(count - (1 if correction is None else correction), 0)
    return var.to(x.dtype), mean.to(x.dtype)


def _var(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    if _stays(x, dim):
        return NotImplemented
    return _aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)[0]
