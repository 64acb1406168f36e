"""Whole steps of one network in this process: every contender checked, metered and timed, as one JSON value.

Memory, time and correctness are measured in separate steps. A contender that cannot run here keeps its row, with the
reason.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import shoal
from bench.batchnorm_contenders import CONTENDERS, EAGER, INDUCTOR, Asked, Contender, pool_first
from bench.conditions import conditions
from bench.cpu_arena.arena import Arena
from bench.frame import WrongResult
from bench.interleave import in_turns, median_ratio, no_collection
from bench.processes import Stage
from bench.reference import FLOAT32, FLOAT64, Start, Trained, hold
from bench.workload import Forward, Workload, make_workload
from examples import networks as models
from shoal.errors import InputError, ShoalError

_SMALL_BATCH, _SMALL_IMAGES, _SMALL_VOLUMES = 4, 64, 32  # images and pixels along each side: of the check in float64
_ARENA_STEPS = 4  # until an arena replays: two alike are recorded, then it is laid out
_PRODUCTS = 5  # timed products of each size


def measure(asked: Asked, tell: Stage = lambda what: None) -> dict[str, Any]:
    """Every contender on one network.

    Args:
        asked: what to measure.
        tell: called with what is about to run.

    Returns:
        Plain values for JSON: `conditions`, `asked`, `flops` of a step, the machine's `limit`, a row a contender.

    Raises:
        WrongResult: a contender trains otherwise than eager PyTorch.
        InputError: there is no such network, or it does not take such images.
    """
    torch.set_num_threads(asked.threads)
    found = conditions(torch.device("cpu"), asked.seed)
    workload = make_workload(asked.network, asked.batch, asked.image, seed=asked.seed)
    if asked.pool_first:
        tell("pools first, in float64")
        assert_pools_first_are_exact(asked.network, asked.image)
        pool_first(workload.model)
    tell("the machine's limit")
    limit = sgemm_flops_per_second(asked.limit_side)
    with ExitStack() as stack:
        race = _Race(workload, asked, tell, stack)
        for name in asked.contenders:
            race.enter(name)
        race.run()
        limit = max(limit, sgemm_flops_per_second(asked.limit_side))
        return {
            "conditions": found,
            "asked": asdict(asked),
            "default_level": shoal.fuse_batchnorm(workload.shared_copy()).summary.level,
            "flops": step_flops(workload),
            "limit_flops_per_second": limit,
            "resident_bytes": workload.resident_bytes,
            "tolerance": {"float32": asdict(FLOAT32), "float64": asdict(FLOAT64)},
            "rows": race.rows(),
        }


def answer(asked: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """What a process for one malloc answers; see `bench.processes`."""
    return measure(Asked(**asked), stage)


class _Race:
    """The contenders of one workload."""

    def __init__(self, workload: Workload, asked: Asked, tell: Stage, stack: ExitStack) -> None:
        self.workload, self.asked, self.tell, self.stack = workload, asked, tell, stack
        self.start = Start(workload)
        tell("eager")
        self.reference: Trained = self.start.train(workload.shared_copy())
        assert_steady(workload, self.start, self.reference)
        self.found: dict[str, dict[str, Any]] = {}
        self.forwards: dict[str, Forward] = {}
        self.arenas: dict[str, Arena] = {}
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    def enter(self, name: str) -> None:
        """Make a contender, hold it against eager, and meter it."""
        contender = CONTENDERS[name]
        self.tell(f"{contender.title}: {'compiling' if contender.compiles else 'checking'}")
        row: dict[str, Any] = {"contender": name, "title": contender.title}
        self.found[name] = row
        try:
            if contender.fuses:
                assert_same_in_float64(self.asked, contender)
            started = time.perf_counter()
            with on_all_cores() if contender.compiles else nullcontext():
                forward = contender.make(self.workload.shared_copy())
                ours = self.start.train(forward)
            row["first_step_seconds"] = time.perf_counter() - started
            row["off"] = hold(ours, self.reference, FLOAT32, f"{self.workload.name}, {contender.title}:")
            del ours
            self.workload.seconds(forward)  # shoal.compile meters its second step too
            row["saved_bytes"], row["saved_storages"] = saved_storages(self.workload, forward)
            row["peak_bytes"] = self.workload.peak_bytes(forward)
        except (RuntimeError, TypeError, ShoalError) as error:
            if not contender.compiles:
                raise
            row["failed"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            return
        summary = getattr(forward, "summary", None)
        if summary is not None:
            row |= {"level": summary.level, "fused": len(summary.fused), "left": len(summary.left)}
        self.forwards[name] = forward

    def run(self) -> None:
        """Steps in turns. Arenas are opened when all the peaks are known, and held against eager once they replay."""
        for name in [name for name in self.forwards if CONTENDERS[name].arena]:
            self.tell(f"{CONTENDERS[name].title}: laying out its arena")
            try:
                self.arenas[name] = self.stack.enter_context(Arena())
            except ShoalError as error:
                self.found[name]["failed"] = str(error)
                del self.forwards[name]
                continue
            for _ in range(_ARENA_STEPS):
                self._step(name)
            self.start.begin()
            self._step(name)
            replayed = self.start.left(self.reference.outputs)  # the clock's steps keep none of their own
            hold(replayed, self.reference, FLOAT32, f"{self.workload.name}, {CONTENDERS[name].title}, in its arena:")
        self.tell(f"{len(self.forwards)} contenders in {self.asked.rounds} rounds")
        self.seconds = in_turns({name: partial(self._step, name) for name in self.forwards}, self.asked.rounds)

    def rows(self) -> list[dict[str, Any]]:
        """What was found, with times and ratios; those that failed have neither."""
        for name, taken in self.seconds.items():
            row = self.found[name]
            row["forward_seconds"], row["backward_seconds"] = (list(part) for part in zip(*taken, strict=True))
            row["times"] = {
                other: speedup(self.seconds[other], taken) for other in (EAGER, INDUCTOR) if other in self.seconds
            }
            if name in self.arenas:
                arena = self.arenas[name]
                row["arena"] = {
                    "bytes": arena.bytes,
                    "fragmentation": arena.fragmentation,
                    "departures": arena.departures,
                    "replayed_steps": arena.replayed_steps,
                }
        return list(self.found.values())

    def _step(self, name: str) -> tuple[float, float]:
        arena = self.arenas.get(name)
        return step_seconds(self.workload, self.forwards[name], nullcontext() if arena is None else arena.step())


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Let what this thread starts, compilers above all, run on every core; then pin it as it was."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)


def step_seconds(workload: Workload, forward: Forward, around: AbstractContextManager[None]) -> tuple[float, float]:
    """One step by the clock: forward pass with its loss, backward pass."""
    workload.reset()
    gc.collect()
    with no_collection(), around:
        started = time.perf_counter()
        loss = F.cross_entropy(forward(workload.images), workload.target)
        turned = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        del loss
    return turned - started, ended - turned


def speedup(theirs: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Median over the turns of their seconds divided by ours in the same turn.

    >>> speedup([(1.0, 2.0), (1.0, 2.0)], [(0.5, 1.0), (0.5, 1.0)])
    {'forward': 2.0, 'backward': 2.0, 'step': 2.0}
    """
    parts = {"forward": itemgetter(0), "backward": itemgetter(1), "step": sum}
    return {name: median_ratio([*map(part, theirs)], [*map(part, ours)]) for name, part in parts.items()}


def saved_storages(workload: Workload, forward: Forward) -> tuple[int, int]:
    """Bytes and number of the distinct storages that the network saves for its backward pass.

    What is there anyway - parameters, buffers, the batch - is not counted; neither is the loss, which is everyone's.
    """
    static = [*workload.model.parameters(), *workload.model.buffers(), workload.images]
    own = {tensor.untyped_storage().data_ptr() for tensor in static}
    held: list[torch.Tensor] = []  # so that no storage's address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    workload.reset()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward(workload.images)
    saved = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    del outputs
    of_the_step = [nbytes for place, nbytes in saved.items() if place not in own]
    return sum(of_the_step), len(of_the_step)


def step_flops(workload: Workload) -> int:
    """FLOPs of eager's step, by `torch.utils.flop_counter`: convolutions and matrix products, counted directly."""
    model = copy.deepcopy(workload.model).to("meta")
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(workload.images.to("meta")), workload.target.to("meta")).backward()
    return counter.get_total_flops()


def sgemm_flops_per_second(most: int) -> float:
    """The best speed at which PyTorch multiplies square float32 matrices here, of sides up to `most`."""
    best = 0.0
    for side in (most // 3, 2 * most // 3, most):
        a, b, c = (torch.ones(side, side) for _ in range(3))
        for _ in range(1 + _PRODUCTS):
            started = time.perf_counter()
            torch.mm(a, b, out=c)
            best = max(best, 2 * side**3 / (time.perf_counter() - started))
    return best


def assert_steady(workload: Workload, start: Start, reference: Trained) -> None:
    """Eager itself trains the same when every number of its images is one rounding off.

    Raises:
        InputError: it does not, so nobody can be held against it: a batch norm over two values gives plus or minus one,
            whatever they are.
    """
    images = workload.images
    generator = torch.Generator().manual_seed(workload.seed)
    up = torch.rand(images.shape, generator=generator) < 0.5
    ends = torch.where(up, float("inf"), -float("inf")).to(images)
    workload.images = torch.nextafter(images, ends)
    try:
        hold(start.train(workload.shared_copy()), reference, FLOAT32, "eager")
    except WrongResult as error:
        off = str(error).split(": ", 1)[1].split(", ")[0]
        raise InputError(
            f"{workload.name} on {images.shape[0]} images of {images.shape[-1]} pixels: eager differs from itself "
            f"where its images are one rounding off, in {off}: give larger images or more of them"
        ) from None
    finally:
        workload.images = images


def assert_same_in_float64(asked: Asked, contender: Contender) -> None:
    """The contender computes what the network does: in float64, on small images.

    Raises:
        WrongResult: it does not.
    """
    workload = _small(asked.network, asked.image)
    if asked.pool_first:
        pool_first(workload.model)
    start = Start(workload)
    theirs = start.train(workload.shared_copy())
    who = f"{asked.network}, {contender.title}, in float64:"
    hold(start.train(contender.make(workload.shared_copy())), theirs, FLOAT64, who)


def assert_pools_first_are_exact(network: str, image: int = _SMALL_IMAGES) -> None:
    """The network computes the same with its pools first: in float64, on images of at most 64 pixels.

    Raises:
        WrongResult: it does not.
    """
    workload = _small(network, image)
    start = Start(workload)
    rewritten = workload.shared_copy()
    pool_first(rewritten)
    hold(start.train(rewritten), start.train(workload.shared_copy()), FLOAT64, f"{network}, pools first, in float64:")


def _small(network: str, image: int) -> Workload:
    volumes = len(models.example_shape(network, 1, image)) == 5
    workload = make_workload(network, _SMALL_BATCH, min(image, _SMALL_VOLUMES if volumes else _SMALL_IMAGES))
    workload.model.double()
    workload.images = workload.images.double()
    return workload
