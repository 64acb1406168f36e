"""A model's training step, captured: entered by Dynamo, stopped when AOTAutograd has its joint graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from shoal.capture.captured import Captured
from shoal.capture.dynamo import (
    ModelRaised,
    Refused,
    call_of,
    drawn_for,
    logging_functions,
    one_graph,
    refusals,
    settings,
)
from shoal.capture.fx_nodes import input_layers, parameter_places
from shoal.capture.step_reader import capture
from shoal.errors import CaptureError
from shoal.lowlevel.torch_internals import eager_kernels


def capture_step(
    model: nn.Module,
    example: torch.Tensor | Sequence[Any],
    *,
    name: str,
    runs_here: bool = True,
    rewrites: bool = True,
) -> tuple[Captured, torch.device]:
    """The step of `model` at the shape of `example`, captured in training mode and not run.

    Args:
        model, example, name: as for `plan`.
        runs_here: whether it will run on the device that it is captured on.
        rewrites: as for `capture`.

    Raises:
        CaptureError: the model is not one graph, or has no output that needs a gradient.
    """
    arguments = (example,) if isinstance(example, torch.Tensor) else tuple(example)
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        with torch.enable_grad(), settings(logging_functions()), one_graph():
            stop = _stop_after_capture(name, runs_here, rewrites)
            with torch.random.fork_rng(devices=[]):
                drawn = drawn_for(model, arguments)
            torch.compile(call_of(model), backend=stop, fullgraph=True, dynamic=False)(*arguments, **drawn)
    except _Done as done:
        return done.captured, done.device
    except ModelRaised as failure:
        shapes = ", ".join(str(tuple(a.shape)) for a in arguments if isinstance(a, torch.Tensor))
        raise CaptureError(f"{name} cannot take an input of shape {shapes}: {failure.reason}") from None
    finally:
        for module, training in modes:
            module.training = training
    raise CaptureError("no output of the model needs a gradient, so there is no training step to plan")


class _Done(Exception):
    """Carries the captured step out of the compiler, which then compiles nothing."""

    def __init__(self, captured: Captured, device: torch.device) -> None:
        self.captured = captured
        self.device = device


def _stop_after_capture(name: str, runs_here: bool, rewrites: bool) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        parameters, layers = parameter_places(gm), input_layers(gm)

        def partition(
            joint: fx.GraphModule,
            joint_inputs: Any,
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: Collection[int] | None = None,
            **unused: Any,
        ) -> Any:
            static = static_lifetime_input_indices or ()
            captured = capture(
                joint,
                num_fwd_outputs,
                static,
                model=name,
                parameters=parameters,
                layers=layers,
                cpu_kernels=runs_here,
                rewrites=rewrites,
            )
            raise Refused(_Done(captured, captured.device))

        with refusals(), eager_kernels():
            return aot_autograd(fw_compiler=_never, partition_fn=partition)(gm, example_inputs)

    return backend


def _never(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return module.forward
