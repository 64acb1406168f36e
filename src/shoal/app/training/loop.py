"""The training loop of `shoal train`: an ordinary PyTorch loop, its memory limit, and what a resumed run needs.

Two runs with the same deciding arguments give the same losses bit for bit on the CPU, whatever their planner and
however often they were interrupted: order and augmentation depend on seed, epoch and image only, and a checkpoint
holds the generators' states. Several ranks share each batch and train as one would with the whole of it; batch norm
and dropout only see a rank's share.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

import shoal.app.models
from shoal.app.data import Data
from shoal.app.data.loaders import Loader
from shoal.app.data.pixels import picture
from shoal.app.training import checkpoint, prepare
from shoal.app.training.options import Outcome, Progress, TrainOptions
from shoal.app.training.ranks import Ranks, Stop, asked_to_stop, lost_ranks_reported
from shoal.app.training.results import check_writable
from shoal.app.training.strategy import Strategy, strategy_of
from shoal.engine.repair import run_again_where_repaired
from shoal.memory.limit import MemoryLimit
from shoal.transforms.split.split import SplitModule

_FAR_APART = 1_000_003  # seeds of ranks, which draw dropout each for itself
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Watcher(Protocol):
    """Is called at the events of a run."""

    def planned(self, state: Any) -> None:
        """The first step ran; `state` is the compiled model's `.shoal`."""

    def stepped(self, now: Progress) -> None:
        """A step is done."""

    def epoch_ended(self, last: Progress, test_accuracy: float) -> None:
        """An epoch is done, tested and saved."""


def train(options: TrainOptions, watcher: Watcher, ranks: Ranks | None = None) -> Outcome:
    """Train as asked, from the beginning or from the checkpoint in `options.out`, until a loss is not finite.

    SIGINT and SIGTERM end the run after the step that runs, with a checkpoint; a second one ends it at once. Where
    several ranks train, each calls this, a signal to one ends all after the same step, and rank 0 writes.

    Raises:
        TransferError: another rank is gone, did not answer in time, or has other options.
        torch.OutOfMemoryError: a step needs more than the limit of `options.enforce`, or than the device has.
        ShoalError: an argument, a file or the data is wrong, no plan fits the budget, the model cannot be captured.
    """
    ranks = ranks or Ranks()
    if ranks.first:
        check_writable(options.out)
    device = prepare.device(options.device)
    options = replace(options, device=device.type if ranks.count > 1 else str(device), ranks=ranks.several)
    ranks.agree("shoal train", {**options.deciding(), "resume": options.resume})
    torch.manual_seed(options.seed + _FAR_APART * ranks.rank)
    data = prepare.open_data(options, ranks)
    layout = prepare.layout(options, prepare.check_fits(options, data))
    with ExitStack() as stack:
        if device.type == "cpu":
            prepare.use_allocator()
        # Entered before the model is made, so that its parameters count.
        meter = prepare.open_memory_limit(stack, device, options.enforce)
        before_bytes = 0 if meter is None else meter.live_bytes  # of other models of this process
        model = shoal.app.models.build(options.model, num_classes=data.num_classes, seed=options.seed)
        model.to(device=device, memory_format=layout)  # type: ignore[call-overload]  # its stub knows no memory_format
        model = prepare.divided(options, model)
        if ranks.count > 1:
            # Of 1 x 1 kernels, whose strides say the same in two ways.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        strategy = strategy_of(options, model, ranks, data.train.batches)
        # Closing is a collective call: not where a rank is gone.
        stack.push(lambda kind, *_: strategy.close() if kind is None or ranks.count == 1 else None)
        run = _Run(options, device, strategy, data, layout, meter, before_bytes, watcher, ranks)
        if options.resume:
            run.resume()
        if options.enforce and meter is not None and options.budget_bytes is not None:
            meter.limit_bytes = before_bytes + options.budget_bytes
        with asked_to_stop() as run.stop, lost_ranks_reported(ranks):
            run.train()
        return run.outcome()


def learning_rate(highest: float, step: int, steps: int) -> float:
    """A linear warm-up over the first tenth of all steps, then a cosine to zero. `step` counts from 0.

    `torch.optim.lr_scheduler.SequentialLR` computes each rate from the one before and differs in the last bit in most
    steps; of this form a resumed run needs no state.

    >>> [round(learning_rate(1.0, step, 20), 2) for step in (0, 1, 10, 19)]
    [0.5, 1.0, 0.54, 0.01]
    """
    rising = max(1, steps // 10)
    if step < rising:
        return highest * (step + 1) / rising
    return highest * (1 + math.cos(math.pi * (step - rising + 1) / (steps - rising + 1))) / 2


@dataclass(eq=False)
class _Run:
    """The objects of a run and where it stands."""

    options: TrainOptions
    device: torch.device
    strategy: Strategy
    data: Data
    layout: torch.memory_format
    meter: MemoryLimit | None
    before_bytes: int
    watcher: Watcher
    ranks: Ranks
    peak_bytes: int | None = None
    reported_plan: bool = False
    stopped_by: int = 0
    diverged: str = ""

    def __post_init__(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.options.amp == "fp16")
        self.position = checkpoint.Position.start()
        self.checkpoint = self.options.out / "checkpoint.pt"
        self.rates: list[tuple[int, float]] = []
        self.stop = Stop()

    def resume(self) -> None:
        self.position = checkpoint.load(
            self.checkpoint, self.options.deciding(), self.strategy, self.scaler, self.ranks
        )

    def save(self) -> None:
        checkpoint.save(self.checkpoint, self.options.deciding(), self.position, self.strategy, self.scaler, self.ranks)

    def train(self) -> None:
        at = self.position
        steps = self.data.train.batches
        while at.epoch < self.options.epochs:
            self.data.set_epoch(at.epoch, first_batch=at.step)
            now = self._progress(steps)
            self.strategy.called.train()
            for images, labels in self._batches(self.data.train):
                if self.ranks.count == 1 == len(images) < self.options.batch:
                    at.step += 1
                    continue  # what is left of the epoch is one image, which batch norm may refuse to train on
                now = self._step(images, labels, steps)
                del images, labels  # else they live on while the next batch is loaded
                if not math.isfinite(at.losses[-1]):
                    self.diverged = f"the loss of step {len(at.losses)} is {at.losses[-1]}"
                    return  # the checkpoint of an earlier step stays
                if self._asked_to_stop() and at.step < steps:
                    if self._weights_are_finite():
                        self.save()
                    return
            if not self._weights_are_finite():
                return
            accuracy = self._test()
            at.accuracies.append(accuracy)
            at.next_epoch()
            self.save()
            self.watcher.epoch_ended(now, accuracy)
            if self._asked_to_stop():
                return

    def _weights_are_finite(self) -> bool:
        """Whether the last step left numbers to go on from; every rank calls it, and they agree."""
        groups = self.strategy.optimizer.param_groups
        own = [getattr(one, "to_local", lambda one=one: one)() for group in groups for one in group["params"]]
        finite = all(bool(each.isfinite().all()) for each in own)
        if not all(each for (each,) in self.ranks.all_gather([float(finite)])):
            self.diverged = f"weights after step {len(self.position.losses)} are not finite"
        return not self.diverged

    def _asked_to_stop(self) -> bool:
        if self.ranks.count == 1:  # else the ranks have agreed
            self.stopped_by = self.stop.signal
        return self.stopped_by != 0

    def _step(self, images: torch.Tensor, labels: torch.Tensor, steps: int) -> Progress:
        if self.meter is not None:
            self.meter.reset_peak()
        began = time.perf_counter()
        at, strategy = self.position, self.strategy
        rate = learning_rate(self.options.lr, at.epoch * steps + at.step, self.options.epochs * steps)
        for group in strategy.optimizer.param_groups:
            group["lr"] = rate
        whole = self.data.train.order.whole(at.step)
        status = getattr(strategy.network, "shoal", None)
        if self.ranks.count == 1 and status is not None and status.runs_again:
            outputs, loss = run_again_where_repaired(
                strategy.network, status, lambda: self._forward_and_backward(images, labels, whole)
            )
        else:
            outputs, loss = self._forward_and_backward(images, labels, whole)
        self.scaler.step(strategy.optimizer)
        self.scaler.update()
        strategy.optimizer.zero_grad(set_to_none=True)
        right = int((outputs.argmax(1) == labels).sum())
        self._read_peak()
        self._count(loss.item(), right, labels.numel(), whole, len(images) / (time.perf_counter() - began))
        if not self.reported_plan and (state := self._state()) is not None:
            self.watcher.planned(state)
            self.reported_plan = True
        now = self._progress(steps)
        self.watcher.stepped(now)
        return now

    def _forward_and_backward(
        self, images: torch.Tensor, labels: torch.Tensor, whole: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs and the loss of a step, whose gradients are there afterwards."""
        self.strategy.optimizer.zero_grad(set_to_none=True)  # of an attempt that ran out of memory
        with self._autocast():
            outputs = self.strategy.called(images)
            loss = nn.functional.cross_entropy(outputs, labels)
        # The ranks' gradients are averaged: where shares differ, each counts as much as it has images.
        fair = loss if len(images) * self.ranks.count == whole else loss * (len(images) * self.ranks.count / whole)
        self.scaler.scale(fair).backward()
        return outputs, loss

    def _count(self, mean: float, right: int, answers: int, images: int, images_per_second: float) -> None:
        """Add a step's results to the run's, over all ranks, and find out whether one is asked to stop."""
        at = self.position
        loss_sum = mean * answers
        if self.ranks.count > 1:
            peak_bytes = -1 if self.peak_bytes is None else self.peak_bytes
            own = (loss_sum, right, answers, images_per_second, peak_bytes, self.stop.signal)
            losses, rights, counts, rates, peaks, signals = zip(*self.ranks.all_gather(own), strict=True)
            loss_sum, right, answers = sum(losses), int(sum(rights)), int(sum(counts))
            mean, images_per_second = loss_sum / answers, sum(rates)
            self.peak_bytes = None if max(peaks) < 0 else int(max(peaks))
            self.stopped_by = int(max(signals))
        at.losses.append(mean)
        at.loss_sum += loss_sum
        at.right += right
        at.answers += answers
        at.step += 1
        self.rates.append((images, images_per_second))

    def _state(self) -> Any:
        """The `.shoal` of the compiled model once it has a plan; None for plain PyTorch and before the first step."""
        state = getattr(self.strategy.network, "shoal", None)
        return None if state is None or state.plan is None else state

    def _read_peak(self) -> None:
        if self.meter is not None:
            self.peak_bytes = max(self.peak_bytes or 0, self.meter.peak_bytes - self.before_bytes)
        elif (state := self._state()) is not None:
            self.peak_bytes = max(state.measured_peak_bytes or 0, state.first_peak_bytes) or None

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
        strategy, ranks = self.strategy, self.ranks
        strategy.called.eval()
        strategy.begin_test()
        right = answers = 0
        max_images = max(1, self.options.batch // 4 // ranks.count)
        for place, (batch, answer) in enumerate(self._batches(self.data.test)):
            largest_share = -(-self.data.test.order.whole(place) // ranks.count)
            calls = -(-largest_share // max_images)  # as many on every rank: a call may be a collective one
            for images, labels in zip(batch.tensor_split(calls), answer.tensor_split(calls), strict=True):
                with self._autocast():
                    outputs = strategy.tested(images)
                right += int((outputs.argmax(1) == labels).sum())
                answers += labels.numel()
        rights, counts, signals = zip(*ranks.all_gather((right, answers, self.stop.signal)), strict=True)
        self.stopped_by = int(max(signals))
        return sum(rights) / max(1, sum(counts))

    def _batches(self, loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # On the CPU the loader's own batch is device memory that the limit counts, unless it comes from a worker.
        copy = self.options.workers > 0
        for images, labels in loader:
            images = images.to(self.device, copy=copy, memory_format=self.layout)
            labels = labels.to(self.device, copy=copy)
            yield images, labels

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, dtype=_DTYPES.get(self.options.amp), enabled=self.options.amp in _DTYPES
        )

    def outcome(self) -> Outcome:
        traffic = self.strategy.traffic
        return Outcome(
            losses=tuple(self.position.losses),
            accuracies=tuple(self.position.accuracies),
            images_per_second=self._images_per_second(),
            measured_peak_bytes=self.peak_bytes,
            status=self._state(),
            checkpoint=self.checkpoint,
            signal=self.stopped_by if self.position.epoch < self.options.epochs else 0,
            diverged=self.diverged,
            travel=self.strategy.explain(),
            traffic=None if traffic is None else traffic.to_json(),
            **self._drawing(),
        )

    def _drawing(self) -> dict[str, Any]:
        """Where the patches lie, and an image to draw them over; nothing where nothing is split."""
        network = self.strategy.network
        if not isinstance(network, SplitModule):
            return {}
        image, _ = self.data.test.dataset[0]
        shown = picture(image.numpy()) if image.dim() == 3 and len(image) in (1, 3) else ""
        return {"patches": network.patch_map(image.shape[1:]), "image": shown}
