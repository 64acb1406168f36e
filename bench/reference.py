"""What plain PyTorch computes, and whether a contender computes the same.

`Reference` is for contenders whose bits must not differ. `Start` and `hold` are for those that sum in another order, as
fused networks do. In float32 a random network is a poor witness: where a sum falls on the other side of a ReLU a
gradient jumps, and on few pixels one such jump is seen everywhere: on 4 images of 32 pixels it moves all gradients of
DenseNet-121 by 5 %. So hold contenders on more images; float32 is held with room for it, parameter by parameter, which
a missing or a wrong term does not pass; what is computed is held in float64 on small images, a million times closer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from bench.frame import WrongResult
from bench.workload import Forward, Workload
from shoal.kernels.generator import generator_state

_MOMENTUM = 0.1  # of a running mean, by PyTorch's default
_TOLERANCE = 1e-6  # of a gradient's norm, on top of plain PyTorch's own error
_OTHER_ORDER = 1e-3  # the same, and of the norm of all gradients, for sums in another order


class _Exact(NamedTuple):
    """What a step leaves in float64."""

    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


@dataclass
class Reference:
    """One plain step, held on the host.

    Attributes:
        workload: whose step it is.
        loss, gradients, buffers, generator: what the step left behind.
        repeatable: whether a second plain step gave the same bits.
    """

    workload: Workload
    initial_buffers: dict[str, torch.Tensor]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor
    repeatable: bool = True

    def start(self) -> None:
        """Put the batch norm statistics back where they were before the first step."""
        self.workload.restore(self.initial_buffers)

    def differences(self, loss: torch.Tensor) -> list[str]:
        """Names of what the step that just ran left different in any bit; it must have begun with `start`."""
        model = self.workload.model
        wrong = [] if torch.equal(loss.cpu(), self.loss) else ["loss"]
        for name, parameter in model.named_parameters():
            if parameter.grad is None or not torch.equal(parameter.grad.cpu(), self.gradients[name]):
                wrong.append(f"gradient of {name}")
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer.cpu(), self.buffers[name]):
                wrong.append(f"buffer {name}")
        if not torch.equal(generator_state(self.workload.device), self.generator):
            wrong.append("generator")
        return wrong

    def gradient_errors(self) -> dict[str, float]:
        """||gradient - plain's|| / ||plain's|| by parameter after the step that just ran, where they differ."""
        errors = {}
        for name, parameter in self.workload.model.named_parameters():
            assert parameter.grad is not None
            ours, plain = parameter.grad.double().cpu(), self.gradients[name].double()
            if not torch.equal(ours, plain):
                errors[name] = float((ours - plain).norm() / plain.norm())
        return errors

    def check(self, forward: Forward, who: str) -> str:
        """Take one step and hold it against plain PyTorch's.

        Returns:
            "equal bits"; "bits of aot_eager" where `torch.compile(backend="aot_eager")`, the same kernels without a
            plan, has the step's bits and not those of eager PyTorch; "float64 rule" where plain PyTorch does not repeat
            itself either, and every gradient is as near to the float64 one as plain PyTorch's, up to as much again.

        Raises:
            WrongResult: none of them holds.
        """
        self.start()
        self.workload.reset()
        loss = self.workload.step(forward)
        wrong = self.differences(loss)
        if not wrong:
            return "equal bits"
        if self.repeatable and self._has_bits_of_aot_eager(loss):
            return "bits of aot_eager"
        if not self.repeatable:
            wrong = self._beyond_float64_rule()
            if not wrong:
                return "float64 rule"
        raise WrongResult(f"{self.workload.name}, {who}: differs from plain PyTorch in {', '.join(wrong[:6])}")

    def _has_bits_of_aot_eager(self, loss: torch.Tensor) -> bool:
        """Whether the step that just ran left what PyTorch's capture alone leaves: documented limits are its own."""
        ours = self._left(loss)
        self.start()
        self.workload.reset()
        theirs = self._left(self.workload.step(torch.compile(self.workload.shared_copy(), backend="aot_eager")))
        return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())

    def _left(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """All that a step leaves, by name."""
        left = {f"gradient of {name}": value for name, value in self.workload.gradients().items()}
        left |= {f"buffer {name}": value for name, value in self.workload.buffers().items()}
        return left | {"loss": loss, "generator": generator_state(self.workload.device)}

    def check_function(self, forward: Forward, who: str, *, gradients: bool = True) -> str:
        """Take one step of a contender that computes the same function in another order, and hold it.

        Args:
            forward, who: the contender, and its name in an error.
            gradients: whether they are held too; without, the loss, the running statistics and the random numbers.

        Returns:
            "equal bits"; "same function": loss and statistics are near plain PyTorch's, and every gradient is as near
            to the float64 one as plain PyTorch's, with room for a sum that falls on the other side of a ReLU.

        Raises:
            WrongResult: it does not.
        """
        self.start()
        self.workload.reset()
        loss = self.workload.step(forward)
        wrong = self.differences(loss)
        if not wrong:
            return "equal bits"
        beyond = [name for name in wrong if name == "generator"]
        if not abs(float(loss) / float(self.loss) - 1) <= FLOAT32.outputs:
            beyond.append(f"loss ({float(loss):.6g}, plain PyTorch's {float(self.loss):.6g})")
        buffers = {name: value.cpu() for name, value in self.workload.buffers().items()}
        off = {name: value for name, value in buffers.items() if self._is_off(name, value)}
        beyond += [f"buffer {name}" for name, value in off.items() if self._is_further_off(name, value)]
        beyond += self._beyond_float64_rule(_OTHER_ORDER) if gradients else []  # last: it puts the buffers back
        if beyond:
            raise WrongResult(f"{self.workload.name}, {who}: computes another function: {', '.join(beyond[:6])}")
        return "same function"

    def _is_off(self, name: str, buffer: torch.Tensor) -> bool:
        before, theirs = self.initial_buffers[name].cpu(), self.buffers[name]
        if _off(buffer - before, theirs - before) <= FLOAT32.statistics:
            return False
        variance = self.buffers.get(name.removesuffix("running_mean") + "running_var")
        if not name.endswith("running_mean") or variance is None:
            return True
        # After a batch norm without activation a mean is zero but for rounding: the spread around it counts.
        spread = _MOMENTUM * float(variance.double().sqrt().norm())
        return not float((buffer.double() - theirs.double()).norm()) <= FLOAT32.statistics * spread

    def _is_further_off(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether a buffer is further from float64 than plain PyTorch's, whose long sums are off."""
        exact = self._float64.buffers[name]
        error = float((buffer.double() - exact).norm())
        return not error <= float((self.buffers[name].double() - exact).norm())

    def _beyond_float64_rule(self, tolerance: float = _TOLERANCE) -> list[str]:
        gradients = self._float64.gradients
        floor = tolerance * float(_flat(gradients).norm())
        wrong = []
        for name, parameter in self.workload.model.named_parameters():
            exact = gradients[name]
            assert parameter.grad is not None
            ours = (parameter.grad.double().cpu() - exact).norm()
            plain = (self.gradients[name].double() - exact).norm()
            if ours > 2 * plain + tolerance * exact.norm() + (floor if tolerance > _TOLERANCE else 0.0):
                wrong.append(f"gradient of {name} (error {ours:.3g}, plain PyTorch's {plain:.3g})")
        return wrong

    @cached_property
    def _float64(self) -> _Exact:
        """The same step in float64; the gradients of the step that just ran stay, its buffers do not."""
        self.start()
        exact = copy.deepcopy(self.workload.model).double()
        for module in list(exact.modules()):
            for name, child in module.named_children():
                if isinstance(child, _DropoutNd):
                    setattr(module, name, _Float32Mask(child))
        exact.zero_grad(set_to_none=True)
        torch.manual_seed(self.workload.seed)
        self.workload.loss(exact(self.workload.images.double())).backward()
        gradients = {name: p.grad.cpu() for name, p in exact.named_parameters() if p.grad is not None}
        return _Exact(gradients, {name: buffer.cpu() for name, buffer in exact.named_buffers()})


class _Float32Mask(nn.Module):
    """Dropout in float64 with the mask that float32 draws."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.dropout(torch.ones_like(x, dtype=torch.float32)).double()


def take_reference(workload: Workload, plain: Forward) -> Reference:
    """Two plain steps from the same start: what the first leaves, and whether the second leaves the same."""
    initial = workload.buffers()
    workload.reset()
    loss = workload.step(plain).cpu()
    gradients, buffers = (
        {k: v.cpu() for k, v in found.items()} for found in (workload.gradients(), workload.buffers())
    )
    reference = Reference(workload, initial, loss, gradients, buffers, generator_state(workload.device))
    reference.start()
    workload.reset()
    reference.repeatable = not reference.differences(workload.step(plain))
    return reference


@dataclass(frozen=True)
class Tolerance:
    """How far a contender may be off.

    Attributes:
        outputs: of their norm.
        gradient: of the norm of each parameter's gradient,
        floor: and of the norm of all of them beside: many are zero but for rounding.
        statistics: of the norm of how far all running means, and all running variances, moved.
    """

    outputs: float
    gradient: float
    floor: float
    statistics: float

    def __str__(self) -> str:
        return (
            f"outputs {self.outputs:g} of their norm, each gradient {self.gradient:g} of its own and {self.floor:g} of "
            f"all, running statistics {self.statistics:g} of how far they moved"
        )


FLOAT32 = Tolerance(outputs=1e-3, gradient=0.1, floor=2e-3, statistics=1e-3)
FLOAT64 = Tolerance(outputs=1e-9, gradient=1e-7, floor=1e-9, statistics=1e-9)


@dataclass(frozen=True)
class Trained:
    """What one step left: the outputs of the network, its gradients, its buffers and how far they moved."""

    outputs: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    moved: Mapping[str, torch.Tensor]


class Start:
    """Where every checked step of a workload starts: its buffers as they are now."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._buffers = workload.buffers()

    def begin(self) -> None:
        """Put the buffers back; no gradients, the same random numbers."""
        self.workload.restore(self._buffers)
        self.workload.reset()

    def train(self, forward: Forward) -> Trained:
        """One step from there, and what it left."""
        self.begin()
        outputs = forward(self.workload.images)
        F.cross_entropy(outputs, self.workload.target).backward()
        return self.left(outputs)

    def left(self, outputs: torch.Tensor) -> Trained:
        """What the step that just ran left; it must have begun with `begin`."""
        buffers = self.workload.buffers()
        moved = {name: buffer - self._buffers[name] for name, buffer in buffers.items()}
        return Trained(outputs.detach().clone(), self.workload.gradients(), buffers, moved)


def differences(ours: Trained, theirs: Trained) -> dict[str, float]:
    """How far off `ours` is: outputs, all gradients and the movement of running statistics, of their norms."""
    found = {
        "outputs": _off(ours.outputs, theirs.outputs),
        "gradients": _off_together(ours.gradients, theirs.gradients),
    }
    for kind in ("running_mean", "running_var"):
        ends = {name for name in theirs.moved if name.endswith(kind)}
        if ends:
            found[kind] = _off_together(_only(ours.moved, ends), _only(theirs.moved, ends))
    return found


def hold(ours: Trained, theirs: Trained, tolerance: Tolerance, who: str) -> dict[str, float]:
    """The differences, all within the tolerance.

    Raises:
        WrongResult: one is not; the worst offenders are named.
    """
    off = differences(ours, theirs)
    wrong = [f"outputs ({off['outputs']:.1e} off)"] if not off["outputs"] <= tolerance.outputs else []
    for kind in ("running_mean", "running_var"):
        if not off.get(kind, 0.0) <= tolerance.statistics:
            wrong.append(f"{kind} ({off[kind]:.1e} off)")
    counts = [name for name in theirs.buffers if name.endswith("num_batches_tracked")]
    wrong += [name for name in counts if not torch.equal(ours.buffers[name], theirs.buffers[name])]
    wrong += [f"gradient of {name}: none" for name in sorted(theirs.gradients.keys() - ours.gradients.keys())]
    floor = tolerance.floor * float(_flat(theirs.gradients).norm())
    over = {}
    for name in theirs.gradients.keys() & ours.gradients.keys():
        gradient = theirs.gradients[name].double()
        allowed = tolerance.gradient * float(gradient.norm()) + floor
        share = float((ours.gradients[name].double() - gradient).norm()) / max(allowed, 1e-300)
        if not share <= 1:
            over[name] = share
    wrong += [f"gradient of {name} ({share:.1f} times its tolerance)" for name, share in _worst_first(over)]
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise WrongResult(f"{who} trains otherwise than eager PyTorch: {', '.join(wrong[:6])}{more}")
    return off


def _worst_first(over: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(over.items(), key=lambda item: -item[1])


def _flat(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)]) if tensors else torch.zeros(0)


def _only(tensors: Mapping[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in names}


def _off_together(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    shared = ours.keys() & theirs.keys()
    return _off(_flat(_only(ours, shared)), _flat(_only(theirs, shared)))


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference, norm = float((ours.double() - theirs.double()).norm()), float(theirs.double().norm())
    return difference / norm if norm else difference
