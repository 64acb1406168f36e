"""A model's training step, captured: entered by Dynamo, stopped when AOTAutograd has its joint graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported, UserError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from shoal.backend import input_layers, parameter_places
from shoal.capture import Captured, capture
from shoal.eager_kernels import eager_kernels
from shoal.errors import CaptureError, ShoalError
from shoal.transforms.split import CUTS_ARGUMENT, SplitModule

UNCAPTURED = (Unsupported, UserError, ConstraintViolationError)


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
        with torch.enable_grad():
            stop = _stop_after_capture(name, runs_here, rewrites)
            with torch.random.fork_rng(devices=[]):
                drawn = drawn_for(model, arguments)
            torch.compile(call_of(model), backend=stop, fullgraph=True, dynamic=False)(*arguments, **drawn)
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, _Done):
            return failure.inner_exception.captured, failure.inner_exception.device
        if isinstance(failure.inner_exception, ShoalError):
            raise failure.inner_exception from None
        raise
    except UNCAPTURED as failure:
        raise capture_error(failure) from None
    except TorchRuntimeError as failure:
        shapes = ", ".join(str(tuple(a.shape)) for a in arguments if isinstance(a, torch.Tensor))
        reason = str(_origin(failure)).strip().splitlines()[0]
        raise CaptureError(f"{name} cannot take an input of shape {shapes}: {reason}") from None
    finally:
        for module, training in modes:
            module.training = training
    raise CaptureError("no output of the model needs a gradient, so there is no training step to plan")


def call_of(model: nn.Module) -> Callable[..., Any]:
    """The model's call, hooks included, as a function that Dynamo enters whatever class the model is of.

    Raises:
        CaptureError: a part of the model is split at drawn cuts.
    """
    if any(_draws(module) for module in model.modules() if module is not model):
        raise CaptureError(
            "a part of the model is split with stochastic=, whose cuts are drawn outside the compiled step; split the "
            "whole model, with depth= or join= to say how far, or compile that part by itself"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # Dynamo keeps and counts its graphs by code object: one of its own, so that no model uses up another's.
    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def drawn_for(model: nn.Module, arguments: Sequence[Any]) -> dict[str, Any]:
    """What the call needs beside its arguments: the cuts drawn for this step, where the model is split at such."""
    cuts = model.draw(*arguments) if isinstance(model, SplitModule) else None
    return {} if cuts is None else {CUTS_ARGUMENT: cuts}


def _draws(module: nn.Module) -> bool:
    return isinstance(module, SplitModule) and module.stochastic is not None


def capture_error(failure: Unsupported | UserError | ConstraintViolationError) -> CaptureError:
    """What Dynamo could not capture, in one line: the reason, the place and the way out."""
    if isinstance(failure, ConstraintViolationError):
        return CaptureError(
            "an op of the split part has one size only when it is compiled, so drawn cuts cannot reach it; join before "
            "it, with join= the name of an earlier module, or split without stochastic="
        )
    frames = [frame for frame in failure.real_stack or () if frame.filename != __file__]
    theirs = [frame for frame in frames if "/torch/" not in frame.filename] or frames  # else a layer of PyTorch's own
    place = f"{theirs[-1].filename}:{theirs[-1].lineno} ({theirs[-1].line})" if theirs else "an unknown line"
    what = str(failure.msg).strip().splitlines()[0]
    return CaptureError(
        f"the model cannot be captured as one graph: {what} at {place}; take data-dependent control flow, printing "
        "and calls into other libraries out of forward(), or compile the submodule that is free of them"
    )


def _origin(failure: BaseException) -> BaseException:
    """What the network itself raised, before Dynamo wrapped it."""
    while deeper := failure.__cause__ or failure.__context__:
        failure = deeper
    return failure


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
            raise _Done(captured, captured.device)

        with eager_kernels():
            return aot_autograd(fw_compiler=_never, partition_fn=partition)(gm, example_inputs)

    return backend


def _never(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return module.forward
