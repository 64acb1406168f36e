"""What runs the planned graphs: PyTorch's own kernels one by one, or Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import fx
from torch._guards import detect_fake_mode

from shoal.errors import InputError

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
NAMES = ("eager", "inductor")


def compiler(name: str) -> Compiler:
    """The function that turns a graph into a callable which empties its list of arguments.

    Raises:
        InputError: there is none of that name.
    """
    if name == "eager":
        return _eager
    if name == "inductor":
        return _inductor
    raise InputError(f"kernels={name!r} is unknown; give 'eager' or 'inductor'")


def _eager(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _inductor(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    fake_mode = detect_fake_mode(example_inputs)
    with config.patch(fallback_random=True), fake_mode or nullcontext():  # dropout draws what eager PyTorch draws
        retraced = make_fx(module, decomposition_table=select_decomp_table())(*example_inputs)
        return compile_fx_inner(retraced, example_inputs)
