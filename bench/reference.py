"""What plain PyTorch computes, and whether a contender computes the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from bench.frame import WrongResult
from bench.workload import Forward, Workload
from shoal.kernels.generator import generator_state

_TOLERANCE = 1e-6  # of a gradient's norm, on top of plain PyTorch's own error


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
    _exact: dict[str, torch.Tensor] = field(default_factory=dict)

    def start(self) -> None:
        """Put the batch norm statistics back where they were before the first step."""
        with torch.no_grad():
            for name, buffer in self.workload.model.named_buffers():
                buffer.copy_(self.initial_buffers[name])

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

    def check(self, forward: Forward, who: str) -> str:
        """Take one step and hold it against plain PyTorch's.

        Returns:
            "equal bits"; "float64 rule" where plain PyTorch does not repeat itself either and every gradient is as
            near to the float64 one as plain PyTorch's, up to as much again.

        Raises:
            WrongResult: neither holds.
        """
        self.start()
        self.workload.reset()
        wrong = self.differences(self.workload.step(forward))
        if not wrong:
            return "equal bits"
        if not self.repeatable:
            wrong = self._beyond_float64_rule()
            if not wrong:
                return "float64 rule"
        raise WrongResult(f"{self.workload.name}, {who}: differs from plain PyTorch in {', '.join(wrong[:6])}")

    def _beyond_float64_rule(self) -> list[str]:
        if not self._exact:
            self._exact = self._float64_gradients()
        wrong = []
        for name, parameter in self.workload.model.named_parameters():
            exact = self._exact[name]
            assert parameter.grad is not None
            ours = (parameter.grad.double().cpu() - exact).norm()
            plain = (self.gradients[name].double() - exact).norm()
            if ours > 2 * plain + _TOLERANCE * exact.norm():
                wrong.append(f"gradient of {name} (error {ours:.3g}, plain PyTorch's {plain:.3g})")
        return wrong

    def _float64_gradients(self) -> dict[str, torch.Tensor]:
        self.start()
        exact = copy.deepcopy(self.workload.model).double()
        for module in list(exact.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Dropout):
                    setattr(module, name, _Float32Mask(child.p))
        exact.zero_grad(set_to_none=True)
        torch.manual_seed(self.workload.seed)
        F.cross_entropy(exact(self.workload.images.double()), self.workload.target).backward()
        return {name: p.grad.cpu() for name, p in exact.named_parameters() if p.grad is not None}


class _Float32Mask(nn.Module):
    """Dropout in float64 with the mask that float32 draws."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.dropout(torch.ones_like(x, dtype=torch.float32), self.p).double()


def take_reference(workload: Workload, plain: Forward) -> Reference:
    """Two plain steps from the same start: what the first leaves, and whether the second leaves the same."""
    model = workload.model
    initial = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    workload.reset()
    loss = workload.step(plain)
    reference = Reference(
        workload,
        initial,
        loss.cpu(),
        {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None},
        {name: buffer.cpu().clone() for name, buffer in model.named_buffers()},
        generator_state(workload.device),
    )
    reference.start()
    workload.reset()
    reference.repeatable = not reference.differences(workload.step(plain))
    return reference
