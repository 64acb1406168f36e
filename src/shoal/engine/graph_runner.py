"""What runs the planned graphs: kernels one by one, of PyTorch, of ours, and of compiled regions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from shoal.capture.early_gradients import hand_over
from shoal.engine.direct_calls import with_direct_calls
from shoal.engine.direct_views import with_direct_views

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def run_in_traced_layouts(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`run_kernels` of a graph whose first run has shown that its tensors are laid out as in the trace."""
    return run_kernels(with_direct_calls(with_direct_views(module)), example_inputs)


def run_kernels(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph as a callable which empties its list of arguments."""
    codegen = _CallsKernels(module.graph)
    module.graph.set_codegen(codegen)
    leaving = [node.name for node in module.graph.nodes if node.target is hand_over]
    module.graph.on_generate_code(lambda _: lambda lines: _yielding(leaving, codegen.with_kernels(lines)))
    module.recompile()
    forward = module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# Ops that steps call often, and whose Python bindings take the same arguments, and 0.5 to 4 us less than the overload.
_BOUND: dict[object, Callable[..., Any]] = {
    overload: getattr(torch, overload._schema.name.removeprefix("aten::"))
    for overload in (
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.cat.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.native_dropout.default,
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.relu.default,
        torch.ops.aten.relu_.default,
        torch.ops.aten.sub.Tensor,
        torch.ops.aten.sum.dim_IntList,
    )
}


class _CallsKernels(fx.graph._BoxedCodeGen):
    """Writes `add_Tensor(x, y)` for `torch.ops.aten.add.Tensor(x, y)`.

    Four names need not be looked up then, nor the overload's `__call__`, which is Python: 0.5 us of each op.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        overloads = {n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
        by_name = {f"torch.ops.{op}": op for op in overloads}
        self._short = {name: f"_{name.removeprefix('torch.ops.').replace('.', '_')}" for name in sorted(by_name)}
        # torch.fx would write the full names of torch's functions again; `partial` makes them somebody else's.
        self._kernels = [
            (short, partial(_BOUND.get(by_name[name], by_name[name]._op))) for name, short in self._short.items()
        ]

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [*super().additional_globals(), *self._kernels]

    def with_kernels(self, lines: list[str]) -> list[str]:
        """The lines of the generated function, with the kernels' short names."""
        return [_AN_OP.sub(lambda found: self._short.get(found[0], found[0]), line) for line in lines]


_AN_OP = re.compile(r"torch\.ops\.\w+\.\w+\.\w+(?=\()")


def _yielding(leaving: Sequence[str], body: list[str]) -> list[str]:
    """Generated code that yields the lists of these names, each where it is made, after what dies there is dropped.

    >>> _yielding(["out"], ["out = hand_over((0,), [g])", ";  g = out = None\\n", "return (h,)"])
    ['out = hand_over((0,), [g])', ';  g = None\\n', 'yield out\\n', 'return (h,)']
    """
    changed: list[str] = []
    name = ""
    for text in body:
        if name:  # what follows the call: the names that die with it
            dying = [one for one in text.strip("; \n").split(" = ")[:-1] if one != name]
            changed += [f";  {' = '.join([*dying, 'None'])}\n" if dying else "\n", f"yield {name}\n"]
            name = ""
            continue
        name = next((one for one in leaving if text.startswith(f"{one} = ")), "")
        changed.append(text)
    return changed
