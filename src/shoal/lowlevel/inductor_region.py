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

from shoal.lowlevel.wide_sums import wide_sums

log = logging.getLogger("shoal")

Boxed = Callable[[list[Any]], Sequence[torch.Tensor]]


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
