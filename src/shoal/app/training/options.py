"""The options of a training run, its progress and its results, as plain data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import shoal
from shoal import planners
from shoal.app import flags
from shoal.app.training.batch_norm_form import check_form
from shoal.core.lossy import DEFAULT_CODEC
from shoal.engine.compile_options import CompileOptions
from shoal.errors import InputError, brief

if TYPE_CHECKING:
    from shoal import Plan
    from shoal.engine.status import Status
    from shoal.transforms.split.patch_map import PatchMap

_KNOWN = {
    "optimizer": ("sgd", "adamw"),
    "amp": ("none", "bf16", "fp16"),
    "kernels": ("auto", "eager", "compiled"),
    "weights": ("host", "sharded"),
    "precision": ("8", "16", "24", "32", "bf16", "adaptive"),
}

MAX_SEED = 2**63 - 1  # PyTorch's generators take 64 bits, of which ranks need room for seeds of their own
_MOST_WORKERS = 8  # a core: PyTorch warns of more than one, and thousands leave no process for anything else

# What may differ between a run and its continuation without a number changing.
_FREE = {"budget_bytes", "planner", "enforce", "workers", "root", "out", "resume"}
_FREE |= {"budget_of", "offload_to", "host_budget_bytes", "rehearse"}


def _flag(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


@dataclass(frozen=True)
class TrainOptions:
    """The arguments of one run: each has its flag of `shoal train`, whose help says what it is.

    Attributes:
        budget_bytes: for planning and for `enforce`; None only for the planner "none" without `enforce`.
        offload_to, host_budget_bytes, rehearse, allow, budget_of: as of `shoal.compile` and `shoal.Options`.
        split, grid, stochastic, halo: as `depth`, `grid`, `stochastic`, `halo` of `shoal.split`.
        precision: "8", "16", "24", "32", "bf16", or "adaptive" (AWP).
        ranks: how many processes train together; None only for one.
    """

    model: flags.Network = "resnet18"
    data: Annotated[str, _flag("digits, image_folder, or FILE.py:FUNCTION.")] = "digits"
    batch: Annotated[int, _flag("Images per step, over all ranks.")] = 128
    budget_bytes: int | None = None
    budget_of: Annotated[
        str, _flag("What it bounds: allocated bytes, or those that CUDA's allocator has reserved.")
    ] = "allocated"
    epochs: Annotated[int, _flag("Passes over the training images.")] = 3
    enforce: Annotated[bool, _flag("Raise OutOfMemoryError above the budget.", "--enforce")] = False
    planner: Annotated[str, _flag(f"{', '.join(planners.NAMES)}, MODULE:FUNCTION, or none for plain PyTorch.")] = (
        "joint"
    )
    offload_to: Annotated[
        str | None, _flag("Where saved tensors may be offloaded: host, a folder, none, or auto for host on CUDA.")
    ] = "auto"
    host_budget_bytes: int | None = None
    rehearse: Annotated[str | None, _flag("A preset of `shoal hardware`, whose link copies on the CPU imitate.")] = None
    codec: flags.Codec = DEFAULT_CODEC
    allow: flags.Allow = None
    split: flags.Split = None
    grid: tuple[int, ...] = (2, 2)
    stochastic: flags.Stochastic = None
    halo: flags.Halo = None
    batch_norm: flags.BatchNorm = None
    out: Path = Path("runs")
    resume: Annotated[bool, _flag("Continue from the checkpoint in --out.", "--resume")] = False
    lr: Annotated[float, _flag("Highest learning rate, between warm-up and cosine decay.")] = 0.02
    momentum: Annotated[float, _flag("SGD's momentum.")] = 0.9
    weight_decay: Annotated[float, _flag("Weight decay.")] = 5e-4
    optimizer: Annotated[str, _flag("sgd or adamw.")] = "sgd"
    seed: Annotated[int, _flag("Seed of weights, order, augmentation and dropout.")] = 0
    workers: Annotated[int, _flag("Processes that load images.")] = 0
    image: Annotated[int | None, _flag("Pixels along each side.")] = None
    kernels: Annotated[str, _flag("What runs the planned step: eager, compiled or auto.", "--kernels")] = "auto"
    amp: Annotated[str, _flag("Autocast: bf16, fp16 or none.")] = "none"
    # Faster, and convolutions need no scratch memory on the CPU.
    channels_last: Annotated[bool, _flag("Memory format of images and weights.", "--channels-last/--contiguous")] = True
    root: Annotated[str | None, _flag("Folder of the data set.")] = None
    device: Annotated[str, _flag("cpu, cuda, or auto.")] = "auto"
    ranks: int | None = None
    compress_gradients: Annotated[
        str | None, _flag("Under torchrun: codec of gradients, such as dynamic_tree; auto measures which pays.")
    ] = None
    weights: Annotated[
        str | None, _flag("host: keep weights and optimizer in host memory; sharded: a shard on each rank.")
    ] = None
    precision: Annotated[str | None, _flag("Precision in which --weights are sent: 8, 16, 24 or 32 bits, or bf16.")] = (
        None
    )
    one_byte: Annotated[
        str | None, _flag("Codec of weights in 8 bits, such as dynamic_tree; by default a float's top byte.")
    ] = None
    awp_threshold: Annotated[
        float | None, _flag("AWP's T: how fast a norm must fall for more bits; -0.002 by default.")
    ] = None
    awp_interval: Annotated[int | None, _flag("AWP's INTERVAL in batches; an epoch by default.")] = None
    parallel: Annotated[str | None, _flag("Under torchrun: a strategy of your own, as MODULE:CLASS.")] = None

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if (given := getattr(self, name)) is not None and given not in known:
                raise InputError(f"unknown {name} {given!r}: give one of {', '.join(known)}")
        for name, minimum in (("batch", 1), ("epochs", 1), ("workers", 0), ("image", 1), ("seed", 0)):
            number = getattr(self, name)
            if number is not None and number < minimum:
                raise InputError(f"{name}={number}: it must be at least {minimum}")
        if self.seed > MAX_SEED:
            raise InputError(f"seed={brief(self.seed)}: it must be at most 2**63 - 1")
        if self.workers > (most := _MOST_WORKERS * (os.cpu_count() or 1)):
            raise InputError(f"workers={brief(self.workers)}: give at most {most}, {_MOST_WORKERS} for each core")
        for name in ("lr", "momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name}={getattr(self, name)}: it must be a finite number of at least 0")
        check_form(self.batch_norm)
        if conflict := next(self._conflicts(), None):
            raise InputError(conflict)
        if self.planner != "none":
            CompileOptions.of(**self.compile_keywords())

    def _conflicts(self) -> Iterator[str]:
        """What cannot be given together, or not without something else."""
        weights, plans, adaptive = self.weights, self.planner != "none", self.precision == "adaptive"
        what = f"--weights {weights}" if weights else f"--parallel {self.parallel}" if self.parallel else ""
        offloads = self.offload_to not in ("auto", None) or self.rehearse is not None
        on_host = weights == "host" and self.offload_to in ("auto", None)  # `rehearse` is for its link
        if self.batch_norm is not None and what:
            yield "--batch-norm is for whole networks: leave out --weights and --parallel"
        if not plans and offloads and not on_host:
            yield "planner 'none' is plain PyTorch, which offloads nothing; choose another planner"
        if self.ranks is not None and self.batch % self.ranks:
            yield f"batch={self.batch} over {self.ranks} ranks: give a multiple of {self.ranks}"
        if weights and self.parallel:
            yield f"--weights {weights} and --parallel {self.parallel} exclude one another; give one"
        if what and plans and weights != "sharded":
            yield f"a plan inside a budget needs whole weights on the device; give {what} with --planner none"
        if what and self.amp == "fp16":
            yield f"{what} cannot be combined with --amp fp16; --amp bf16 is possible"
        if self.precision and not weights:
            yield f"precision {self.precision!r} is for weights that are sent; give --weights host or sharded too"
        if self.one_byte and self.precision not in ("8", "adaptive"):
            yield f"--one-byte {self.one_byte} is for weights in 8 bits; give --precision 8 or --adaptive-precision too"
        if (self.awp_threshold is not None or self.awp_interval is not None) and not adaptive:
            yield "a threshold or an interval of AWP needs --adaptive-precision"
        if weights == "host" and self.ranks is not None:
            yield f"--weights host trains one process, torchrun started {self.ranks}; give --weights sharded"
        if weights == "host" and self.compress_gradients == "auto":
            yield "--weights host measures no link; name a codec: --compress-gradients dynamic_tree"
        if self.budget_bytes is None and (self.enforce or plans):
            yield "no budget was given; give --budget, such as 150MiB, or --planner none for plain PyTorch"

    def compile_keywords(self) -> dict[str, Any]:
        """Those of `shoal.compile`."""
        options = shoal.Options(
            planner=self.planner,
            kernels=self.kernels,
            host_budget=self.host_budget_bytes,
            rehearse=self.rehearse,
            budget_of=self.budget_of,
            codec=self.codec,
        )
        return {"budget": self.budget_bytes, "allow": self.allow, "offload_to": self.offload_to, "options": options}

    def deciding(self) -> dict[str, Any]:
        """The arguments that decide every number of the run: a continuation must have the same."""
        encodes = self.planner != "none" and CompileOptions.of(**self.compile_keywords()).lossy is not None
        free = _FREE - {"budget_bytes"} if encodes else _FREE  # the budget decides what is encoded
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in free}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {**asdict(self), "out": str(self.out)}


@dataclass(frozen=True)
class Progress:
    """How a run stands after a step; sums over the epoch so far.

    Attributes:
        epoch, epochs: counted from 1, and how many there will be.
        step, steps: of the epoch, counted from 1, and how many it has.
        loss: mean over the epoch's images so far.
        accuracy: share of right answers so far, in 0..1.
        images_per_second: median over the full batches of this process after its first; 0 before there is a step.
        peak_bytes: most device bytes in use during any step so far, None where nothing counts them.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    accuracy: float
    images_per_second: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        losses: one per training step, earlier parts of a resumed run included.
        accuracies: on the test images, in 0..1, one per finished epoch.
        images_per_second: as of `Progress`.
        measured_peak_bytes: most device bytes in use during a step, None where nothing counts them.
        status: the compiled model's `.shoal` once it has a plan; None for plain PyTorch.
        checkpoint: the file to resume from.
        signal: what stopped the run before its end, 0 for nothing.
        diverged: what is not finite, the loss of which step or the weights after which, and stopped the run; "" for
            nothing. The checkpoint is of an earlier step then.
        patches: where the patches of a split network lie in its images.
        image: the first test image as an address that begins with "data:", to draw them over.
        traffic: bytes that rank 0 put on the wire, as of `Traffic.to_json`; None where nothing is sent.
        travel: how things are sent and why, in lines for people.
    """

    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    images_per_second: float
    measured_peak_bytes: int | None
    status: Status | None
    checkpoint: Path
    signal: int
    diverged: str = ""
    patches: PatchMap | None = None
    image: str = ""
    traffic: dict[str, Any] | None = None
    travel: str = ""

    @property
    def plan(self) -> Plan | None:
        """What the steps ran by."""
        return None if self.status is None else self.status.plan

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The highest of all plans."""
        return None if self.status is None else self.status.predicted_peak_bytes

    @property
    def test_accuracy(self) -> float | None:
        """After the last finished epoch, None before the first."""
        return self.accuracies[-1] if self.accuracies else None
