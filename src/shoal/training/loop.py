"""The training loop behind `shoal train`: an ordinary PyTorch loop, the wall around it, and what a resumed run needs.

Two runs with the same deciding arguments give the same losses bit for bit on the CPU, whatever their planner and
however often they were interrupted: order and augmentation depend on seed, epoch and image alone, and a checkpoint
holds the generators' states.
"""

from __future__ import annotations

import gc
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

import shoal
import shoal.data
import shoal.models
from shoal.data import Data
from shoal.data.loaders import Loader
from shoal.data.pixels import picture
from shoal.errors import InputError
from shoal.machine import device_of
from shoal.runtime.arena import Arena
from shoal.runtime.arena_cuda import CudaArena
from shoal.runtime.wall import Wall, wall
from shoal.training import checkpoint
from shoal.training.optimizers import learning_rate, optimizer_of
from shoal.training.options import ArenaOutcome, Outcome, Progress, TrainOptions
from shoal.training.results import check_writable, versions
from shoal.transforms.split import SplitModule

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Watcher(Protocol):
    """Told of a run's events while it runs."""

    def planned(self, state: Any) -> None:
        """The first step ran; `state` is the compiled model's `.shoal`."""

    def stepped(self, now: Progress) -> None:
        """A step is done."""

    def epoch_ended(self, last: Progress, test_accuracy: float) -> None:
        """An epoch is done, tested and saved."""


def train(options: TrainOptions, watcher: Watcher) -> Outcome:
    """Train as asked, from the beginning or from the checkpoint in `options.out`.

    SIGINT and SIGTERM end the run after the step that runs, with a checkpoint; a second one ends it at once.

    Raises:
        torch.OutOfMemoryError: a step went past the wall of `options.enforce`, or past the device.
        ShoalError: an argument, a file or the data is wrong, no plan fits the budget, the model cannot be captured.
    """
    check_writable(options.out)
    device = _device(options.device)
    options = replace(options, device=str(device))
    torch.manual_seed(options.seed)
    data = _open_data(options)
    layout = _layout(options, _check_fits(options, data))
    with ExitStack() as stack:
        # Raised before the model is made, so that its parameters count.
        meter = _raise_wall(stack, device, options.enforce)
        model = shoal.models.build(
            options.model, num_classes=data.num_classes, in_channels=data.in_channels, seed=options.seed
        )
        model.to(device=device, memory_format=layout)  # type: ignore[call-overload]  # its stub knows no memory_format
        model = _divided(options, model)
        arena = _open_arena(device) if options.arena else None
        if arena is not None:
            stack.callback(arena.close)
        run = _Run(options, device, model, data, layout, meter, arena, watcher)
        if options.resume:
            run.resume()
        if options.enforce and meter is not None:
            meter.limit_bytes = options.budget_bytes
        with _asked_to_stop() as stop:
            run.train(stop)
        return run.outcome(stop.signal)


class _Run:
    """The objects of a run and where it stands."""

    def __init__(
        self,
        options: TrainOptions,
        device: torch.device,
        model: nn.Module,
        data: Data,
        layout: torch.memory_format,
        meter: Wall | None,
        arena: Arena | CudaArena | None,
        watcher: Watcher,
    ) -> None:
        self.options = options
        self.device = device
        self.data = data
        self.layout = layout
        self.meter = meter
        self.arena = arena
        self.watcher = watcher
        self.optimizer = optimizer_of(
            options.optimizer, model, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.amp == "fp16")
        self.model = _compiled(options, model, self.optimizer)
        self.position = checkpoint.Position.start()
        self.checkpoint = options.out / "checkpoint.pt"
        self.peak_bytes: int | None = None
        self.rates: list[tuple[int, float]] = []
        self.told_plan = False

    def resume(self) -> None:
        self.position = checkpoint.load(
            self.checkpoint, self.options.deciding(), self.model, self.optimizer, self.scaler
        )

    def save(self) -> None:
        checkpoint.save(
            self.checkpoint, self.options.deciding(), self.position, self.model, self.optimizer, self.scaler
        )

    def train(self, stop: _Stop) -> None:
        at = self.position
        self.data.set_epoch(0)
        steps = len(self.data.train)
        while at.epoch < self.options.epochs:
            self.data.set_epoch(at.epoch, first_batch=at.step)
            now = self._progress(steps)
            self.model.train()
            for images, labels in self._batches(self.data.train):
                if len(images) == 1 < self.options.batch:
                    at.step += 1
                    continue  # what is left of the epoch is one image, which batch norm may refuse to train on
                now = self._step(images, labels, steps)
                del images, labels  # else they live on while the next batch is loaded
                if stop.signal and at.step < steps:
                    self.save()
                    return
            accuracy = self._test()
            at.accuracies.append(accuracy)
            at.next_epoch()
            self.save()
            self.watcher.epoch_ended(now, accuracy)
            if stop.signal:
                return

    def _step(self, images: torch.Tensor, labels: torch.Tensor, steps: int) -> Progress:
        if self.meter is not None:
            self.meter.reset_peak()
        began = time.perf_counter()
        at = self.position
        rate = learning_rate(self.options.lr, at.epoch * steps + at.step, self.options.epochs * steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # An epoch's short last batch makes a sequence of allocations of its own.
        with nullcontext() if self.arena is None else self.arena.step(images.shape):
            with self._autocast():
                outputs = self.model(images)
                loss = nn.functional.cross_entropy(outputs, labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        mean = loss.item()
        at.losses.append(mean)
        at.loss_sum += mean * labels.numel()
        at.right += int((outputs.argmax(1) == labels).sum())
        at.answers += labels.numel()
        at.step += 1
        seconds = time.perf_counter() - began
        self.rates.append((len(images), len(images) / seconds))
        self._read_peak()
        if not self.told_plan and (state := self._state()) is not None:
            self.watcher.planned(state)
            self.told_plan = True
        now = self._progress(steps)
        self.watcher.stepped(now)
        return now

    def _state(self) -> Any:
        """What `shoal.compile` tells of its plan; None for plain PyTorch and before the first step."""
        state = getattr(self.model, "shoal", None)
        return None if state is None or state.plan is None else state

    def _read_peak(self) -> None:
        if self.meter is not None:
            self.peak_bytes = max(self.peak_bytes or 0, self.meter.peak_bytes)
        elif (state := self._state()) is not None:
            self.peak_bytes = state.measured_peak_bytes

    def _images_per_second(self) -> float:
        """The median over the full batches of this process after its first, which may have waited for a plan."""
        full = [rate for images, rate in self.rates[1:] if images == self.options.batch]
        return statistics.median(full or [rate for _, rate in self.rates] or [0.0])

    def _progress(self, steps: int) -> Progress:
        at = self.position
        return Progress(
            epoch=at.epoch + 1,
            epochs=self.options.epochs,
            step=at.step,
            steps=steps,
            loss=at.loss_sum / max(1, at.answers),
            accuracy=at.right / max(1, at.answers),
            images_per_second=self._images_per_second(),
            peak_bytes=self.peak_bytes,
        )

    @torch.no_grad()
    def _test(self) -> float:
        """The share of right answers on the test images, in quarter batches: testing must fit where training fits."""
        self.model.eval()
        right = answers = 0
        each = max(1, self.options.batch // 4)
        for batch, answer in self._batches(self.data.test):
            for images, labels in zip(batch.split(each), answer.split(each), strict=True):
                with self._autocast():
                    outputs = self.model(images)
                right += int((outputs.argmax(1) == labels).sum())
                answers += labels.numel()
        return right / max(1, answers)

    def _batches(self, loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # On the CPU the loader's own batch is device memory that the wall counts, unless it comes from a worker.
        copy = self.options.workers > 0
        for images, labels in loader:
            images = images.to(self.device, copy=copy, memory_format=self.layout)
            labels = labels.to(self.device, copy=copy)
            yield images, labels

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, dtype=_DTYPES.get(self.options.amp), enabled=self.options.amp in _DTYPES
        )

    def outcome(self, stopped_by: int) -> Outcome:
        state = self._state()
        return Outcome(
            losses=tuple(self.position.losses),
            accuracies=tuple(self.position.accuracies),
            images_per_second=self._images_per_second(),
            measured_peak_bytes=self.peak_bytes,
            plan=getattr(state, "plan", None),
            planning_seconds=getattr(state, "planning_seconds", None),
            lower_bound_seconds=getattr(state, "lower_bound_seconds", None),
            predicted_peak_bytes=getattr(state, "predicted_peak_bytes", None),
            checkpoint=self.checkpoint,
            signal=stopped_by if self.position.epoch < self.options.epochs else 0,
            versions=versions(self.options),
            arena=self._arena_outcome(),
            **self._drawing(),
        )

    def _drawing(self) -> dict[str, Any]:
        """Where the patches lie, and an image to draw them over; nothing where nothing is split."""
        if not isinstance(self.model, SplitModule):
            return {}
        image, _ = self.data.test.dataset[0]
        shown = picture(image.numpy()) if image.dim() == 3 and len(image) in (1, 3) else ""
        return {"patches": self.model.patch_map(image.shape[1:]), "image": shown}

    def _arena_outcome(self) -> ArenaOutcome | None:
        arena = self.arena
        if arena is None:
            return None
        return ArenaOutcome(arena.bytes, arena.fragmentation, arena.departures, arena.replayed_steps)


class _Stop:
    """Which signal asked the run to end, 0 for none."""

    signal = 0


@contextmanager
def _asked_to_stop() -> Iterator[_Stop]:
    """Note SIGINT and SIGTERM instead of obeying them at once; a second one acts as ever."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the workers must outlive the step that ends the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return device_of(name)


def _raise_wall(stack: ExitStack, device: torch.device, enforce: bool) -> Wall | None:
    """A wall without a limit yet, which counts; None where it is not asked for and cannot be had."""
    gc.collect()  # what an earlier run in this process has left would count
    try:
        return stack.enter_context(wall(None, device))
    except InputError:
        if enforce:
            raise
        return None


def _open_arena(device: torch.device) -> Arena | CudaArena:
    return CudaArena(device) if device.type == "cuda" else Arena(device)


def _open_data(options: TrainOptions) -> Data:
    """The data set, with labels per pixel for networks that answer per pixel."""
    dense: dict[str, Any] = {}
    if options.model.startswith("unet"):
        if options.data != "synthetic":
            raise InputError(f"{options.model} answers per pixel, data {options.data!r} per image; give 'synthetic'")
        dense = {"dense": True, "dims": 3 if options.model.endswith("3d") else 2}
    data = shoal.data.open(
        options.data,
        batch=options.batch,
        image=options.image,
        root=options.root,
        seed=options.seed,
        workers=options.workers,
        **dense,
    )
    for loader in (data.train, data.test):
        loader.worker_init_fn = _leave_signals_to_the_parent
    return data


def _check_fits(options: TrainOptions, data: Data) -> tuple[int, ...]:
    """The shape of a batch, which the network was seen to take."""
    shape = shoal.models.example_shape(options.model, options.batch, data.image, in_channels=data.in_channels)
    try:
        with torch.device("meta"), torch.no_grad():
            network = shoal.models.build(options.model, num_classes=data.num_classes, in_channels=data.in_channels)
            network.eval()(torch.empty(shape))
            divided = _divided(options, network)
    except RuntimeError as error:
        raise InputError(
            f"{options.model} cannot take images of {data.image} pixels a side "
            f"({str(error).strip().splitlines()[0]}); give a larger --image"
        ) from error
    if isinstance(divided, SplitModule):
        divided.check(shape[2:])
    return shape


def _divided(options: TrainOptions, model: nn.Module) -> nn.Module:
    if options.split is None:
        return model
    return shoal.split(model, options.split, options.grid, options.stochastic, halo=options.halo)  # type: ignore[arg-type]


def _layout(options: TrainOptions, shape: tuple[int, ...]) -> torch.memory_format:
    """Of images and weights. A three-dimensional network has another channels-last than a two-dimensional one."""
    if not options.channels_last:
        return torch.preserve_format
    return torch.channels_last_3d if len(shape) == 5 else torch.channels_last


def _compiled(options: TrainOptions, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    if options.planner == "none":
        return model
    return shoal.compile(
        model,
        budget=options.budget_bytes,
        planner=options.planner,
        offload_to=options.offload_to,
        host_budget=options.host_budget_bytes,
        rehearse=options.rehearse,
        lossy=options.lossy,
        optimizer=optimizer,
        inner=options.inner,
        name=options.model,
    )
