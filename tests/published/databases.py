"""PyTorch's own databases of modules and of ops, each entry as a small network that can be trained.

`module_db` has inputs for nearly every module of torch.nn, `op_db` for nearly every differentiable op. In the network
of an op, the first input is multiplied by a parameter, and every other tensor that wants a gradient is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.published.training import Network

_SAMPLES = 4  # of a module in one mode; transformers have 288, each of another flag


@dataclass(frozen=True)
class Case:
    """One sample of an entry: `build` makes the same network every time."""

    name: str
    build: Callable[[], Network]


class OpModule(nn.Module):
    """`op(x * scale, ...)`."""

    def __init__(self, op: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        self.op, self.then = op, sample.output_process_fn_grad
        inputs, self.input_spec = tree_flatten(sample.input)
        self.rest, self.rest_spec = tree_flatten((tuple(sample.args), dict(sample.kwargs)))
        self.scales = nn.ParameterList(torch.ones_like(one.detach()) for one in inputs if _trains(one))
        self.weights = nn.ParameterList(one.detach().clone() for one in self.rest if _trains(one))
        self.input_trains = [_trains(one) for one in inputs]
        self.rest_trains = [_trains(one) for one in self.rest]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> OpModule:
        self.rest = [fn(one) if isinstance(one, torch.Tensor) else one for one in self.rest]
        return super()._apply(fn, recurse)

    def forward(self, *inputs: Any) -> Any:
        scales, weights = list(self.scales), list(self.weights)
        given = [one * scales.pop(0) if trains else one for one, trains in zip(inputs, self.input_trains, strict=True)]
        rest = [weights.pop(0) if trains else one for one, trains in zip(self.rest, self.rest_trains, strict=True)]
        args, kwargs = tree_unflatten(rest, self.rest_spec)
        return self.then(self.op(tree_unflatten(given, self.input_spec), *args, **kwargs))


class EvalPart(nn.Module):
    """A module in eval mode as part of one that trains: a model in eval mode runs outside of any plan."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)


def _narrowed(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float64 else value


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def op_cases() -> Iterator[Case]:
    """Each op that autograd knows, in float32 and where it can in complex64, with the largest of its samples."""
    for op in op_db:
        for dtype in (torch.float32, torch.complex64):
            if op.supports_autograd and op.supports_dtype(dtype, "cpu"):
                name = "_".join(filter(None, (op.name, op.variant_test_name, "complex64" if dtype.is_complex else "")))
                yield Case(name, partial(_op_network, op, dtype))


def _op_network(op: Any, dtype: torch.dtype) -> Network:
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    sample = max(samples, key=lambda sample: _elements((sample.input, sample.args, sample.kwargs)))
    inputs = tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in tree_leaves(sample.input))
    return Network(OpModule(op.op, sample), inputs, {})


def _elements(values: Any) -> int:
    return sum(one.numel() for one in tree_leaves(values) if isinstance(one, torch.Tensor))


def module_cases() -> Iterator[Case]:
    """Some samples of each module, in training mode and, where that is another function, in eval mode."""
    for info in module_db:
        if info.is_lazy or torch.float32 not in info.dtypes:
            continue
        for training in (True, False) if info.train_and_eval_differ else (True,):
            count = len(_module_inputs(info, training))
            for place in sorted({round(n * (count - 1) / (_SAMPLES - 1)) for n in range(_SAMPLES)}):
                name = f"{info.name}_{place}{'' if training else '_eval'}"
                yield Case(name, partial(_module_network, info, training, place))


def _module_inputs(info: Any, training: bool) -> list[Any]:
    torch.manual_seed(0)
    how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": training}
    return list(info.module_inputs_func(info, **how))


def _module_network(info: Any, training: bool, place: int) -> Network:
    sample = _module_inputs(info, training)[place]
    own = sample.constructor_input.args, sample.constructor_input.kwargs
    args, kwargs = tree_map(_narrowed, own)  # random samples of FractionalMaxPool, which has to have its input's dtype
    module = info.module_cls(*args, **kwargs)
    given = sample.forward_input
    return Network(module if training else EvalPart(module), tuple(given.args), dict(given.kwargs))
