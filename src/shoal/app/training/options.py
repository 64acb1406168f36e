"""The options of a training run, its progress and its results, as plain data."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shoal
from shoal.app.training.batch_norm_form import check_form
from shoal.core.lossy import DEFAULT_CODEC
from shoal.engine.compile_options import CompileOptions
from shoal.errors import InputError, brief

if TYPE_CHECKING:
    from shoal import Plan
    from shoal.transforms.split.patch_map import PatchMap

OPTIMIZERS = ("sgd", "adamw")
PRECISIONS = ("none", "bf16", "fp16")
KERNELS = ("auto", "eager", "compiled")
WEIGHTS = ("host", "sharded")
PRECISIONS_OF_WEIGHTS = ("8", "16", "24", "32", "bf16", "adaptive")

MAX_SEED = 2**63 - 1  # PyTorch's generators take 64 bits, of which ranks need room for seeds of their own
_MOST_WORKERS = 8  # a core: PyTorch warns of more than one, and thousands leave no process for anything else

# What may differ between a run and its continuation without a number changing.
_FREE = {"budget_bytes", "planner", "enforce", "workers", "root", "out", "resume"}
_FREE |= {"budget_of", "offload_to", "host_budget_bytes", "rehearse"}


@dataclass(frozen=True)
class TrainOptions:
    """The arguments of one run.

    Attributes:
        model, data: as for `shoal.app.models.build` and `shoal.app.data.open`.
        batch: images per step, over all ranks.
        budget_bytes: for planning and for `enforce`; None only for the planner "none" without `enforce`.
        planner: as of `shoal.compile`; "none" trains with plain PyTorch.
        epochs: passes over the training images.
        enforce: train within a memory limit of `budget_bytes`.
        lr: the highest learning rate; see `shoal.app.training.loop.learning_rate`.
        momentum, weight_decay, optimizer: of the optimizer, one of `OPTIMIZERS`; momentum is SGD's.
        seed: of the weights, the order, the augmentation and dropout.
        workers: processes that load images; 0 loads them in this one.
        image: pixels along each side; None for what the data set has.
        kernels: what runs the planned graphs, one of `KERNELS`.
        amp: autocast's type, one of `PRECISIONS`.
        channels_last: lay images out with channels innermost: faster, and convolutions need no scratch on the CPU.
        root: folder of the data set, None for its usual place.
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
        split, grid, stochastic, halo: as `depth`, `grid`, `stochastic`, `halo` of `shoal.split`; split is None for the
            network as it is.
        batch_norm: the form of batch norms, one of `shoal.app.training.batch_norm_form.FORMS`; None: as they are.
        offload_to, host_budget_bytes, rehearse: as `offload_to`, `host_budget` and `rehearse` of `shoal.compile`.
        allow, budget_of: as of `shoal.compile`.
        codec: as of `shoal.Options`.
        ranks: how many processes train together; None only for one.
        compress_gradients: the codec in which gradients are sent, "auto" for what measures fastest, None for float32.
        weights: "host" keeps weights and optimizer on the host, "sharded" a share of them on each rank; None: whole on
            every rank.
        precision: in which `weights` are sent: "8", "16", "24" or "32" bits, "bf16", or "adaptive" (AWP).
        one_byte: the codec that stands in for 8 bits of them, such as "dynamic_tree"; None: a float's top byte.
        awp_threshold, awp_interval: AWP's T, and its INTERVAL in batches, None for those of an epoch.
        parallel: a subclass of `shoal.app.training.strategy.Strategy`, as MODULE:CLASS; None for data parallel.
        out: folder of everything the run writes.
        resume: continue from the checkpoint in `out`.
    """

    model: str = "resnet18"
    data: str = "digits"
    batch: int = 128
    budget_bytes: int | None = None
    planner: str = "joint"
    epochs: int = 3
    enforce: bool = False
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 5e-4
    optimizer: str = "sgd"
    seed: int = 0
    workers: int = 0
    image: int | None = None
    kernels: str = "auto"
    amp: str = "none"
    channels_last: bool = True
    root: str | None = None
    device: str = "auto"
    split: float | None = None
    grid: tuple[int, ...] = (2, 2)
    stochastic: float | None = None
    halo: str | None = None
    batch_norm: str | None = None
    offload_to: str | None = "auto"
    host_budget_bytes: int | None = None
    budget_of: str = "allocated"
    rehearse: str | None = None
    codec: str = DEFAULT_CODEC
    allow: str | None = None
    ranks: int | None = None
    compress_gradients: str | None = None
    weights: str | None = None
    precision: str | None = None
    one_byte: str | None = None
    awp_threshold: float | None = None
    awp_interval: int | None = None
    parallel: str | None = None
    out: Path = Path("runs")
    resume: bool = False

    def __post_init__(self) -> None:
        for name, known in (("optimizer", OPTIMIZERS), ("amp", PRECISIONS), ("kernels", KERNELS)):
            if getattr(self, name) not in known:
                raise InputError(f"unknown {name} {getattr(self, name)!r}: give one of {', '.join(known)}")
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
        if self.batch_norm is not None and (self.weights is not None or self.parallel is not None):
            raise InputError("--batch-norm is for whole networks: leave out --weights and --parallel")
        offloads = self.offload_to not in ("auto", None) or self.rehearse is not None
        if self.planner == "none" and offloads and not (self.weights == "host" and self.offload_to in ("auto", None)):
            raise InputError("planner 'none' is plain PyTorch, which offloads nothing; choose another planner")
        if self.ranks is not None and self.batch % self.ranks:
            raise InputError(f"batch={self.batch} over {self.ranks} ranks: give a multiple of {self.ranks}")
        self._check_travel()
        if self.budget_bytes is None and (self.enforce or self.planner != "none"):
            raise InputError("no budget was given; give --budget, such as 150MiB, or --planner none for plain PyTorch")
        if self.planner != "none":
            CompileOptions.of(**self.compile_keywords())

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

    def _check_travel(self) -> None:
        for name, known in (("weights", WEIGHTS), ("precision", PRECISIONS_OF_WEIGHTS)):
            if (given := getattr(self, name)) is not None and given not in known:
                raise InputError(f"unknown {name} {given!r}: give one of {', '.join(known)}")
        what = f"--weights {self.weights}" if self.weights else f"--parallel {self.parallel}" if self.parallel else ""
        if self.weights and self.parallel:
            raise InputError(f"--weights {self.weights} and --parallel {self.parallel} exclude one another; give one")
        if what and self.planner != "none" and self.weights != "sharded":
            raise InputError(
                f"a plan inside a budget needs whole weights on the device; give {what} with --planner none"
            )
        if what and self.amp == "fp16":
            raise InputError(f"{what} cannot be combined with --amp fp16; --amp bf16 is possible")
        if self.precision and not self.weights:
            raise InputError(
                f"precision {self.precision!r} is for weights that are sent; give --weights host or sharded too"
            )
        if self.one_byte and self.precision not in ("8", "adaptive"):
            raise InputError(
                f"--one-byte {self.one_byte} is for weights in 8 bits; give --precision 8 or --adaptive-precision too"
            )
        awp = self.awp_threshold is not None or self.awp_interval is not None
        if awp and self.precision != "adaptive":
            raise InputError("a threshold or an interval of AWP needs --adaptive-precision")
        if self.weights == "host" and self.ranks is not None:
            raise InputError(
                f"--weights host trains one process, torchrun started {self.ranks}; give --weights sharded"
            )
        if self.weights == "host" and self.compress_gradients == "auto":
            raise InputError("--weights host measures no link; name a codec: --compress-gradients dynamic_tree")

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
        images_per_second: median over the full batches of this process after its first; 0 if there was no step.
        measured_peak_bytes: most device bytes in use during a step, None where nothing counts them.
        plan: the plan the steps ran; None for plain PyTorch.
        planning_seconds, lower_bound_seconds, predicted_peak_bytes: of that plan.
        checkpoint: the file to resume from.
        signal: what stopped the run before its end, 0 for nothing.
        diverged: what is not finite, the loss of which step or the weights after which, and stopped the run; "" for
            nothing. The checkpoint is of an earlier step then.
        versions: torch, python, shoal, and the threads and seed the run had.
        patches: where the patches of a split network lie in its images.
        image: the first test image as an address that begins with "data:", to draw them over.
        traffic: bytes that rank 0 put on the wire, as of `Traffic.to_json`; None where nothing is sent.
        travel: how things are sent and why, in lines for people.
    """

    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    images_per_second: float
    measured_peak_bytes: int | None
    plan: Plan | None
    planning_seconds: float | None
    lower_bound_seconds: float | None
    predicted_peak_bytes: int | None
    checkpoint: Path
    signal: int
    versions: dict[str, Any]
    patches: PatchMap | None = None
    image: str = ""
    traffic: dict[str, Any] | None = None
    travel: str = ""
    diverged: str = ""

    @property
    def test_accuracy(self) -> float | None:
        """After the last finished epoch, None before the first."""
        return self.accuracies[-1] if self.accuracies else None
