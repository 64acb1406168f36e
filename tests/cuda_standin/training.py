"""Training steps in a process of their own, where CUDA is used for the first time: what they take, counted twice.

`python -m tests.cuda_standin.training CASE` runs them; tests call `trained`. The plans do not depend on times measured
here: costs are of the suite's made-up machine.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from examples import networks as models
from shoal.cost import measure_links
from tests import made_up_machine
from tests.cuda_standin.counts import Record, device_counts, record_all, recorded, reset_device_peak

_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "fused_adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def _blocks(n_blocks: int, channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for place in range(n_blocks):
        layers += [nn.Conv2d(32 if place else channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return layers


class _Chain(nn.Sequential):
    """A small network, most of whose step is activations."""

    def __init__(self) -> None:
        super().__init__(*_blocks(8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class _Broken(nn.Module):
    """The same, captured as two graphs."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(_Chain())
        self.first, self.second = nn.Sequential(*layers[:12]), nn.Sequential(*layers[12:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


_SMALL = {"chain": _Chain, "broken": _Broken}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        net, batch, image: the network, of timm's where the name begins with "timm/", and its batches.
        optimizer: "sgd" (with momentum), "adamw" or "fused_adamw", whose step takes no copies of all parameters.
        amp: "bf16", "fp16" (with a GradScaler that leaves out the first optimizer step) or "" for float32.
        share: the budget, of the peak of plain PyTorch; None: plain PyTorch.
        steps: how many.
        beside: what stands there beside the model all the time: "ema", a second model of the same size, or "".
        workspace_bytes: what cuDNN asks for in each convolution.
        channels_last: the memory format of model and images.
        passes: forward and backward passes of a step, onto the same gradients.
        allow: the means that Shoal may use.
        budget_of: what the budget bounds.
        ddp: whether DistributedDataParallel wraps the model, on one rank, over gloo.
        kernels: "eager" for op by op, "compiled" as CUDA's default has it; without a budget "torch.compile" for that.
        recorded: whether peaks are counted by the allocator's record, which Shoal then shares; else by its statistics.
    """

    net: str = "resnet18"
    batch: int = 64
    image: int = 224
    optimizer: str = "sgd"
    amp: str = ""
    share: float | None = None
    steps: int = 5
    beside: str = ""
    workspace_bytes: int = 0
    channels_last: bool = False
    passes: int = 1
    allow: str = "bitwise"
    recorded: bool = True
    budget_of: str = "allocated"
    ddp: bool = False
    kernels: str = "eager"

    def __str__(self) -> str:
        words = (
            self.net,
            self.optimizer,
            self.amp or "fp32",
            f"{self.share or 1:.0%}",
            self.beside,
            "ddp" * self.ddp,
            self.kernels.removeprefix("eager"),
        )
        return "-".join(
            [word for word in words if word] + [f"{self.workspace_bytes >> 20}MiB"] * bool(self.workspace_bytes)
        )


@dataclass(frozen=True)
class Step:
    """One step of a run, or the run as far as that step.

    Attributes:
        predicted_bytes, metered_bytes: as `model.shoal` says after it.
        counted_bytes: the peak of its forward and backward pass, by the allocator's record.
        allocated_bytes: the peak that torch.cuda.max_memory_allocated reads for the same.
        reserved_bytes: the most that was taken from the device meanwhile, by the stand-in's own count.
        predicted_reserved_bytes: as `model.shoal` says after it; 0 where it does not.
        repairs: how often was planned again.
        launches, synchronizations, mallocs: in its forward and backward pass, these of pages too.
        has_state: whether the optimizer had its state when it began.
    """

    predicted_bytes: int
    metered_bytes: int
    counted_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    predicted_reserved_bytes: int
    repairs: int
    launches: int
    synchronizations: int
    mallocs: int
    has_state: bool


@dataclass(frozen=True)
class Run:
    """What a run left over.

    Attributes:
        budget_bytes: 0 for plain PyTorch.
        steps: one by one.
        warnings: what Shoal said.
        departures: what it noted of steps that took another course than was planned.
        beside_bytes: of what stands there in addition to the model and is not of its step: a second model, the labels.
        compiled: what the plan says of its compiled regions.
        n_recomputed: how many ops the plan runs a second time.
    """

    budget_bytes: int
    steps: tuple[Step, ...]
    warnings: tuple[str, ...]
    departures: tuple[str, ...]
    beside_bytes: int
    compiled: tuple[str, ...]
    n_recomputed: int

    @property
    def peak_bytes(self) -> int:
        """The highest peak of the steps from the second on."""
        return max(step.allocated_bytes for step in self.steps[1:])


@cache
def trained(case: Case) -> Run:
    """Run the case in a process of its own."""
    budget_bytes = 0
    if case.share is not None:
        budget_bytes = int(case.share * plain(case).peak_bytes)
    with TemporaryDirectory() as own_cache:  # no plan and no workspace of an earlier run
        environment = {"SHOAL_CACHE": own_cache, "STANDIN_CUDNN_WORKSPACE_BYTES": str(case.workspace_bytes)}
        told = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps([asdict(case), budget_bytes])],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(told.stdout.splitlines()[-1])
    return Run(
        found["budget_bytes"],
        tuple(Step(**step) for step in found["steps"]),
        tuple(found["warnings"]),
        tuple(found["departures"]),
        found["beside_bytes"],
        tuple(found["compiled"]),
        found["n_recomputed"],
    )


def plain(case: Case) -> Run:
    """The same training in plain PyTorch, with nothing else."""
    return trained(replace(case, share=None, beside="", allow="bitwise", steps=2, kernels="eager"))


def _run(case: Case, budget_bytes: int) -> Run:
    said: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = said.append  # type: ignore[method-assign]
    log = logging.getLogger("shoal")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    if case.recorded:
        record_all()
    last = torch.channels_last_3d if case.net == "unet3d" else torch.channels_last
    layout = last if case.channels_last else torch.contiguous_format
    model = _network(case.net).cuda().to(memory_format=layout)
    before_bytes = torch.cuda.memory_allocated()
    beside = [_network(case.net).cuda().to(memory_format=layout)] if case.beside else []
    volumes = case.net == "unet3d"
    pixels = [case.image] * (3 if volumes else 2)
    labels = torch.zeros(case.batch, *pixels * case.net.startswith("unet"), dtype=torch.long, device="cuda")
    beside_bytes = torch.cuda.memory_allocated() - before_bytes
    images = torch.empty(case.batch, 1 if volumes else 3, *pixels, device="cuda").to(memory_format=layout)
    optimizer = _OPTIMIZERS[case.optimizer](model.parameters())
    if budget_bytes:
        model = shoal.compile(
            model,
            budget=budget_bytes,
            optimizer=optimizer,
            allow=case.allow,
            options=shoal.Options(budget_of=case.budget_of, kernels=case.kernels),
        )
    elif case.kernels == "torch.compile":
        model.compile()
    status = getattr(model, "shoal", None)
    if case.ddp:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        model = DistributedDataParallel(model)
    scaler = _Scaler("cuda", enabled=case.amp == "fp16")
    steps = tuple(_step(case, model, status, optimizer, scaler, images, labels) for _ in range(case.steps))
    del beside
    plan = status.plan if status else None
    return Run(
        budget_bytes,
        steps,
        tuple(record.getMessage() for record in said if record.levelno >= logging.WARNING),
        tuple(text for record in said if "another course" in (text := record.getMessage())),
        beside_bytes,
        plan.compiled if plan else (),
        sum(moment.phase == "recompute" for moment in plan.timeline.moments) if plan else 0,
    )


class _Scaler(torch.amp.GradScaler):
    """Finds no number in the first gradients only, as one does whose scale begins high: no kernel computes here."""

    _steps = 0

    def _maybe_opt_step(self, optimizer: Any, *given: Any, **named: Any) -> Any:
        self._steps += 1
        return optimizer.step() if self._steps > 1 else None


def _network(name: str) -> nn.Module:
    if name.startswith("timm/"):
        import timm  # takes a second

        return timm.create_model(name.removeprefix("timm/"), num_classes=10)
    if name in _SMALL:
        return _SMALL[name]()
    return models.build(name, num_classes=10, in_channels=1) if name == "unet3d" else models.build(name)


def _step(
    case: Case, model: nn.Module, status: Any, optimizer: Any, scaler: Any, images: torch.Tensor, labels: torch.Tensor
) -> Step:
    torch.cuda.reset_peak_memory_stats()
    reset_device_peak()
    before, has_state = device_counts(), bool(optimizer.state)
    with recorded() if case.recorded else nullcontext(Record()) as record:
        for _ in range(case.passes):
            with torch.autocast("cuda", dtype=_DTYPES[case.amp]) if case.amp else nullcontext():
                loss = nn.functional.cross_entropy(model(images).float(), labels)
            scaler.scale(loss).backward()
        allocated_bytes = torch.cuda.max_memory_allocated()
    after = device_counts()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return Step(
        predicted_bytes=(status and status.predicted_peak_bytes) or 0,
        metered_bytes=(status and status.measured_peak_bytes) or 0,
        counted_bytes=record.peak_bytes or allocated_bytes,
        allocated_bytes=allocated_bytes,
        reserved_bytes=after.peak_bytes,
        predicted_reserved_bytes=(status and status.predicted_reserved_bytes) or 0,
        repairs=status.repairs if status else 0,
        launches=after.launches - before.launches,
        synchronizations=after.synchronizations - before.synchronizations,
        mallocs=after.mallocs - before.mallocs,
        has_state=has_state,
    )


if __name__ == "__main__":
    made_up_machine.put_in_place()
    measure_links._cuda_copies = lambda device: (made_up_machine.SLAB,)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention wants a device that computes
    given, given_bytes = json.loads(sys.argv[1])
    print(json.dumps(asdict(_run(Case(**given), given_bytes))), flush=True)
    os._exit(0)  # autograd's device thread may still be at work: Python would end it, and the process with it
