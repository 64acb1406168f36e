"""Whether a contender trains as plain PyTorch does, up to rounding: outputs, gradients, running statistics.

A fused network adds up in another order, so its bits differ; `bench.reference` is for contenders whose bits must not.
In float32 a random network is a poor witness: where a sum falls on the other side of a ReLU a gradient jumps, and on
few pixels one such jump is seen everywhere: on 4 images of 32 pixels it moves all gradients of DenseNet-121 by 5 %. So
hold contenders on more; float32 is held with room for it, parameter by parameter, which a missing or a wrong term does
not pass; and what is computed is held in float64 on small images, a million times closer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bench.frame import WrongResult
from bench.workload import Forward, Workload


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
        self._buffers = {name: buffer.detach().clone() for name, buffer in workload.model.named_buffers()}

    def begin(self) -> None:
        """Put the buffers back; no gradients, the same random numbers."""
        with torch.no_grad():
            for name, buffer in self.workload.model.named_buffers():
                buffer.copy_(self._buffers[name])
        self.workload.reset()

    def train(self, forward: Forward) -> Trained:
        """One step from there, and what it left."""
        self.begin()
        outputs = forward(self.workload.images)
        F.cross_entropy(outputs, self.workload.target).backward()
        return self.left(outputs)

    def left(self, outputs: torch.Tensor) -> Trained:
        """What the step that just ran left; it must have begun with `begin`."""
        model = self.workload.model
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        return Trained(
            outputs.detach().clone(),
            {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None},
            buffers,
            {name: buffer - self._buffers[name] for name, buffer in buffers.items()},
        )


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
