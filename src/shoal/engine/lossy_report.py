"""`lossy_report`: what encoding convolution inputs does to each layer's gradient, on one batch, against exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from shoal.capture.call_arguments import Example, arguments_of
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.capture.encode_activations import Offer, encoded, offers
from shoal.core import arguments
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.presets import get as preset
from shoal.core.sizes import format_bytes
from shoal.engine.search.choose_encoded import as_encoded, encoded_by
from shoal.errors import InputError
from shoal.kernels.encoded_activation import measured_errors
from shoal.planners.keep_all import keep_all

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class LayerError:
    """What became of one weight's gradient.

    Attributes:
        parameter: its name.
        relative_error: ||gradient - exact|| / ||exact||; 0 where both are 0.
        cosine: of the angle between the two, in -1..1; 1 where one is 0.
        activation_error: ||decoded - x|| / ||x|| of the layer's input x.
        exact_bytes, encoded_bytes: of that input.
    """

    parameter: str
    relative_error: float
    cosine: float
    activation_error: float
    exact_bytes: int
    encoded_bytes: int


@dataclass(frozen=True)
class LossyReport:
    """What encoding does on one batch.

    Attributes:
        codec: its name and options, for people.
        layers: one for each layer whose input is encoded, in the order of the forward pass.
        differing: names of all parameters whose gradient is not the exact one's bits.
        same_outputs: whether the forward pass gave the same bits.
    """

    codec: str
    layers: tuple[LayerError, ...]
    differing: tuple[str, ...]
    same_outputs: bool

    @property
    def largest_error(self) -> float:
        """Of the relative errors of the gradients."""
        return max((layer.relative_error for layer in self.layers), default=0.0)

    def explain(self) -> str:
        """One line a layer."""
        exact, small = (sum(getattr(x, key) for x in self.layers) for key in ("exact_bytes", "encoded_bytes"))
        lines = [
            f"{self.codec}: {len(self.layers)} layers read {format_bytes(exact)} in {format_bytes(small)}; "
            f"largest error of a gradient {100 * self.largest_error:.3g} %",
            f"{'gradient of':<32} {'its error':>10} {'cosine':>12} {'input error':>12} {'exact':>10} {'encoded':>10}",
        ]
        for layer in self.layers:
            lines.append(
                f"{layer.parameter:<32} {layer.relative_error:>10.2e} {layer.cosine:>12.9f} "
                f"{layer.activation_error:>12.2e} {format_bytes(layer.exact_bytes):>10} "
                f"{format_bytes(layer.encoded_bytes):>10}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return asdict(self)


def lossy_report(
    model: nn.Module,
    example: Example,
    lossy: LossyOptions,
    *,
    compiled: Callable[[nn.Module, Plan], nn.Module],
    loss: Loss | None = None,
    plan: Plan | None = None,
) -> LossyReport:
    """What `model.shoal.lossy_report` tells, for any model.

    Args:
        model: the network; copies of it run, so that it stays as it is. It is run in training mode.
        example: the batch, real numbers of it, as `example` of `shoal.plan`.
        lossy: the codec, unless `plan` has one.
        compiled: makes a model run under a plan.
        loss: outputs → a scalar; by default the mean of their squares.
        plan: encode what this plan encodes, in its codec. By default everything that may be encoded is.

    Returns:
        A `LossyReport`: `explain()` for people, `to_json()` for later.

    Raises:
        InputError: an argument is none of what is listed above.
        CaptureError: the model is not one graph.
    """
    arguments.instance("model", model, nn.Module)
    captured, device = capture_step(model, example, name=type(model).__name__)
    said = None if plan is None else encoded_by(plan.residences)
    if plan is not None and said is None:
        raise InputError("the plan encodes nothing, so there is nothing to report; plan with allow='exact, encode'")
    permitted, wanted = said or (lossy, None)
    offered = offers(captured, permitted if wanted is None else replace(permitted, exempt=frozenset()))
    found = [offer for offer in offered if wanted is None or offer.storage in wanted]
    if not found:
        return LossyReport(permitted.describe(), (), (), True)
    everything = plan_of_encoded(captured, [offer.storage for offer in found], permitted)
    loss = loss or _mean_square
    outputs, exact = _gradients(copy.deepcopy(model).train(), example, loss, device)
    lossy_model = compiled(copy.deepcopy(model).train(), everything)
    with measured_errors() as errors:
        same, rough = _gradients(lossy_model, example, loss, device)
    # The first encodings were tried out, to be timed.
    names = [storage.name for storage in everything.encoded]
    error_of = dict(zip(names, errors[-len(names) :], strict=True))
    layers = [
        _layer_error(f"{layer}.weight", exact, rough, offer, error_of[offer.storage])
        for offer in found
        for layer in offer.layers
        if f"{layer}.weight" in exact
    ]
    differing = tuple(name for name in exact if not torch.equal(exact[name], rough[name]))
    return LossyReport(permitted.describe(), tuple(layers), differing, _all_equal(outputs, same))


def plan_of_encoded(captured: Captured, chosen: Sequence[str], lossy: LossyOptions) -> Plan:
    """A plan that keeps everything, these storages encoded; its times are those of no machine."""
    step = encoded(captured, chosen, lossy)
    made = keep_all(step.graph, preset("p100-nvlink"), 0)
    return as_encoded(made, captured.graph, chosen, lossy)


def _gradients(
    model: nn.Module, example: Example, loss: Loss, device: torch.device
) -> tuple[Any, dict[str, torch.Tensor]]:
    args, kwargs = arguments_of(example)
    for parameter in model.parameters():
        parameter.grad = None
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(0)
        outputs = model(*args, **kwargs)
        loss(outputs).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outputs, found


def _layer_error(
    parameter: str, exact: Mapping[str, torch.Tensor], rough: Mapping[str, torch.Tensor], offer: Offer, error: float
) -> LayerError:
    one, other = exact[parameter].double().flatten(), rough[parameter].double().flatten()
    norm, both = float(one.norm()), float(one.norm() * other.norm())
    return LayerError(
        parameter,
        float((other - one).norm()) / norm if norm else 0.0,
        float(one @ other) / both if both else 1.0,
        error,
        offer.nbytes,
        offer.payload_bytes,
    )


def _mean_square(outputs: Any) -> torch.Tensor:
    parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return torch.stack([part.float().square().mean() for part in parts if part.requires_grad]).sum()


def _all_equal(ours: Any, theirs: Any) -> bool:
    pairs = zip(*(torch.utils._pytree.tree_leaves(value) for value in (ours, theirs)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
