"""A model's training step, captured: entered by Dynamo, stopped when AOTAutograd has its joint graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from shoal.capture.assigned_data import copy_assigned_data
from shoal.capture.call_arguments import Example, arguments_of
from shoal.capture.captured import Captured
from shoal.capture.dynamo import (
    ErrorThroughDynamo,
    ModelRaised,
    call_of,
    drawn_for,
    few_collections,
    logging_functions,
    one_graph,
    refusals,
    settings,
)
from shoal.capture.early_gradients import Fate
from shoal.capture.failed_traces import line_of_failure
from shoal.capture.sizes_of_values import break_at_unknown_sizes
from shoal.capture.step_reader import capture
from shoal.capture.traced_functions import admit_cumulative_norms, tracing_fake_quantization
from shoal.errors import CaptureError, InputError
from shoal.graph.fx_nodes import input_layers, parameter_places
from shoal.lowlevel.torch_internals import eager_kernels
from shoal.rewrites.rewrite import Rewrite
from shoal.rewrites.table import TABLE

Result = TypeVar("Result")
_NO_STEP = "no output of the model needs a gradient, so there is no training step to plan"


def capture_step(
    model: nn.Module, example: Example, *, name: str, runs_here: bool = True, rewrites: Sequence[Rewrite] = TABLE
) -> tuple[Captured, torch.device]:
    """The step of `model` at the shape of `example`, captured in training mode and not run.

    Args:
        model, example, name: as for `plan`.
        runs_here: whether it will run on the device that it is captured on.
        rewrites: as for `capture`.

    Raises:
        CaptureError: the model is not one graph, or has no output that needs a gradient.
    """

    def read(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Captured, torch.device]:
        captured = joint_step(gm, inputs, InputPlaces.of(gm), name=name, runs_here=runs_here, rewrites=rewrites)
        return captured, captured.device

    return in_dynamo(model, example, read, name=name)


def in_dynamo(
    model: nn.Module, example: Example, read: Callable[[fx.GraphModule, Sequence[Any]], Result], *, name: str
) -> Result:
    """What `read` makes of the graph that Dynamo captures of a training step, which is not compiled or run.

    Args:
        model, example, name: as for `plan`.
        read: called with the graph and its inputs, while Dynamo waits for what its backend returns.

    Raises:
        InputError: `example` is none of `arguments_of`, or names other arguments than the model takes.
        CaptureError: the model is not one graph, or has no output that needs a gradient.
        InputRefused: the model raises an exception of its own.
    """
    args, kwargs = arguments_of(example)
    _reject_other_arguments(model, args, kwargs, name)
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with refusals():
            break_at_unknown_sizes(gm)
            copy_assigned_data(gm, inputs)
            raise ErrorThroughDynamo(_Done(read(gm, inputs)))

    admit_cumulative_norms(model)
    try:
        with (
            torch.enable_grad(),
            tracing_fake_quantization(model),
            settings(logging_functions()),
            one_graph(),
            few_collections(),
        ):
            with torch.random.fork_rng(devices=[]):
                drawn = drawn_for(model, args)
            torch.compile(call_of(model), backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs, **drawn)
    except _Done as done:
        result: Result = done.result
        return result
    except ModelRaised as failure:
        given = (*args, *kwargs.values())
        shapes = ", ".join(str(tuple(value.shape)) for value in given if isinstance(value, torch.Tensor))
        refusal = f"{name} cannot take an input of shape {shapes}"
        raise InputRefused(refusal, details={"error": failure.reason}) from None
    finally:
        for module, training in modes:
            module.training = training
    raise CaptureError(_NO_STEP)


def _reject_other_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
    try:
        signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        otherwise = (
            "(example,) to pass a dict as its only argument" if kwargs else "a tuple with a value for each of them"
        )
        raise InputError(f"{name}.forward: {error}; type {otherwise}") from None


class InputRefused(CaptureError):
    """The model's own forward pass raises an exception with this input."""


class _Done(Exception):
    """Carries a result out of a compiler, which then compiles nothing."""

    def __init__(self, result: Any) -> None:
        self.result = result


@dataclass(frozen=True)
class InputPlaces:
    """What the inputs of a graph of Dynamo's are, by the places that AOTAutograd will see.

    Attributes:
        parameters: which are parameters.
        layers: module paths of the layers whose parameters and buffers are inputs.
        early: the fate of gradients that may leave before the backward pass ends.
    """

    parameters: Collection[int]
    layers: Mapping[int, str]
    early: Mapping[int, Fate] = field(default_factory=dict)

    @staticmethod
    def of(gm: fx.GraphModule) -> InputPlaces:
        return InputPlaces(parameter_places(gm), input_layers(gm))


def joint_step(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    places: InputPlaces,
    *,
    name: str,
    runs_here: bool = True,
    rewrites: Sequence[Rewrite] = TABLE,
    keeps_as_written: bool = True,
) -> Captured:
    """The step of a graph of Dynamo's: traced by AOTAutograd as far as the joint graph, and read.

    Args:
        gm, inputs: as Dynamo hands them to a backend.
        places: what the inputs are.
        name: the model's.
        runs_here, rewrites, keeps_as_written: as for `capture`.

    Raises:
        CaptureError: no output needs a gradient, or PyTorch lost one on the meta device.
    """

    def partition(
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Collection[int] | None = None,
        **unused: Any,
    ) -> Any:
        _reject_lost_gradients(joint, num_fwd_outputs, inputs, places, name)
        captured = capture(
            joint,
            num_fwd_outputs,
            static_lifetime_input_indices or (),
            model=name,
            parameters=places.parameters,
            layers=places.layers,
            cpu_kernels=runs_here,
            rewrites=rewrites,
            keeps_as_written=keeps_as_written,
            early=places.early,
        )
        raise _Done(captured)

    try:
        with eager_kernels(), line_of_failure():
            aot_autograd(fw_compiler=_never, partition_fn=partition)(gm, inputs)
    except _Done as done:
        captured: Captured = done.result
        return captured
    raise CaptureError(_NO_STEP)


def _reject_lost_gradients(
    joint: fx.GraphModule, n_outputs: int, inputs: Sequence[Any], places: InputPlaces, name: str
) -> None:
    """On the meta device torch 2.13 traces no gradient through PReLU and SELU: the step would be too small."""
    returned = joint.graph.output_node().args[0]
    assert isinstance(returned, Sequence)
    outputs = {node for node in returned[:n_outputs] if isinstance(node, fx.Node)}
    nodes = joint.graph.find_nodes(op="placeholder")
    for place, (value, node, gradient) in enumerate(zip(inputs, nodes, returned[n_outputs:], strict=False)):
        if not isinstance(value, torch.Tensor) or value.device.type != "meta" or not value.requires_grad:
            continue
        if gradient is None and _reaches(node, outputs):
            of = f"layer {places.layers[place]}" if place in places.layers else "an input"
            raise CaptureError(
                f"{name}: PyTorch loses the gradient of {of} on the meta device, as with PReLU; make "
                "model and example on the CPU, which runs nothing of them"
            )


def _reaches(start: fx.Node, ends: Collection[fx.Node]) -> bool:
    """Whether a result is computed from it, without `detach` and with values that have gradients all the way."""
    seen, left = {start}, [start]
    while left:
        node = left.pop()
        if node in ends:
            return True
        value = node.meta.get("val")
        ends_here = isinstance(value, torch.Tensor) and not value.is_floating_point()
        if ends_here or node.target is torch.ops.aten.detach.default:
            continue
        new = [user for user in node.users if user not in seen]
        seen.update(new)
        left += new
    return False


def _never(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return module.forward
