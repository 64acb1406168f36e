"""Whole training steps with the CPU's caching allocator and in an arena, against glibc's malloc as it comes and tuned.

    OMP_NUM_THREADS=1 python -m bench.arena          a quarter of an hour
    python -m bench.arena --quick                    tiny inputs, to see that it runs

A step is forward, cross entropy, backward, SGD with momentum and `zero_grad`, in channels_last float32: in plain eager
PyTorch, and under `shoal.compile` with `allow="bitwise"` inside a share of plain PyTorch's peak. Each contender is a
process of its own, since malloc is tuned when a process starts. They take turns, one step each, in rounds that start
one further every time; one runs at a time. CPU time tells more than the clock if others run on the same cores. The
losses of a round must be equal to the last bit. The first steps, which the arena records and then lays out, are warm-up
for all. "Held" is the most that the process has of the machine's memory, beyond what it has before the model is made
(with planning, if there is a plan); then, over the most bytes that tensors use at once in plain PyTorch.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from statistics import median
from typing import Any

import psutil
import torch
from rich.table import Table
from torch.nn import functional as F

import shoal
from bench.cpu_arena.arena import Arena
from bench.frame import NETWORKS, Bench, Run, WrongResult
from bench.interleave import turns
from bench.network import Setting
from bench.processes import HUGE_PAGES, NEVER_UNMAPPED, Stage, Worker, malloc_environment
from bench.tables import new_table
from bench.workload import make_workload
from shoal.core.sizes import format_bytes
from shoal.memory.cpu_allocator import CACHING as CACHING_KIND
from shoal.memory.cpu_allocator import TORCH, cpu_memory

SETTINGS = {  # one to five seconds a step on one thread
    "resnet50": Setting(batch=8, image=160),
    "vgg16_bn": Setting(batch=4, image=160),
    "mobilenet_v2": Setting(batch=16, image=224),
    "densenet121": Setting(batch=4, image=224),
    "unet": Setting(batch=2, image=256),
}
QUICK_SETTINGS = {name: Setting(2, 32) for name in SETTINGS}
DEFAULT, TUNED, HUGE = "malloc", "malloc, tuned", "malloc, tuned, huge pages"
CACHING, ARENA = "caching allocator", "arena"
SHARE = 0.4  # of plain PyTorch's peak, as in the README's table
INSIDE, INSIDE_CACHING = f"{DEFAULT}, inside {SHARE:.0%}", f"{CACHING}, inside {SHARE:.0%}"
TUNABLES = {
    DEFAULT: "",
    TUNED: NEVER_UNMAPPED,
    HUGE: f"{NEVER_UNMAPPED}:{HUGE_PAGES}",
    CACHING: "",
    ARENA: "",
    INSIDE: "",
    INSIDE_CACHING: "",
}
WARM_UPS = 4
ROUNDS = 9


def measure_network(name: str, setting: Setting, *, rounds: int, seed: int) -> dict[str, Any]:
    """Every contender's steps on one network, in turns.

    Raises:
        WrongResult: the losses of a round differ.
    """
    contenders = list(TUNABLES)
    taken: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    with ExitStack() as stack:
        workers = {contender: stack.enter_context(_started(contender)) for contender in contenders}
        asked = {"network": name, "batch": setting.batch, "image": setting.image, "seed": seed}
        # In a process of its own: a child begins with the most that its parent has held.
        with Worker("bench.arena:plain_peak_bytes", malloc_environment("", torch.get_num_threads(), os.environ)) as one:
            budget_bytes = int(SHARE * one.ask(asked))
        for contender, worker in workers.items():
            budget = budget_bytes if contender in (INSIDE, INSIDE_CACHING) else None
            worker.ask(asked | {"arena": contender == ARENA, "budget_bytes": budget})
        for contender, _ in turns(contenders, WARM_UPS + rounds):
            taken[contender].append(workers[contender].ask("step"))
        for turn, steps in enumerate(zip(*taken.values(), strict=True), 1):
            losses = [step["loss"] for step in steps]
            if len(set(losses)) != 1:
                raise WrongResult(f"{name}, step {turn}: the losses differ: {losses}")
        arena = workers[ARENA].ask("arena")
        most_bytes = workers[CACHING].ask("most_bytes")
    rows = {}
    for contender, steps in taken.items():
        timed = steps[WARM_UPS:]
        rows[contender] = {
            "seconds": [step["seconds"] for step in timed],
            "cpu_seconds": [step["cpu_seconds"] for step in timed],
            "faults": [step["faults"] for step in timed],
            "held_bytes": max(step["held_bytes"] for step in timed),
            "warm_up_seconds": [step["seconds"] for step in steps[:WARM_UPS]],
        }
    return {"network": name, "setting": asdict(setting), "rows": rows, "arena": arena, "most_bytes": most_bytes}


def network_table(result: Mapping[str, Any]) -> Table:
    """A row for each contender of one network."""
    setting, arena, rows = result["setting"], result["arena"], result["rows"]
    table = new_table(
        f"{result['network']}, {setting['batch']} x {setting['image']} pixels: arena of "
        f"{format_bytes(arena['arena_bytes'])}, {arena['fragmentation']:.3f} of the most in use, "
        f"{arena['departures']} departures in {arena['replayed_steps']} replayed steps",
        "< | a step | of malloc's | CPU time | of malloc's | page faults a step | held | over the most in use",
    )
    seconds, cpu_seconds = median(rows[DEFAULT]["seconds"]), median(rows[DEFAULT]["cpu_seconds"])
    for contender, row in rows.items():
        table.add_row(
            contender,
            f"{median(row['seconds']):.3f} s",
            f"{median(row['seconds']) / seconds:.2f}",
            f"{median(row['cpu_seconds']):.3f} s",
            f"{median(row['cpu_seconds']) / cpu_seconds:.2f}",
            f"{median(row['faults']):.0f}",
            format_bytes(row["held_bytes"]),
            f"{row['held_bytes'] / result['most_bytes']:.2f}",
        )
    return table


def _started(contender: str) -> Worker:
    allocator = CACHING_KIND if contender in (CACHING, INSIDE_CACHING) else TORCH
    environment = malloc_environment(TUNABLES[contender], torch.get_num_threads(), os.environ, allocator=allocator)
    return Worker("bench.arena:Trainer", environment)


def plain_peak_bytes(question: Mapping[str, Any], stage: Stage) -> int:
    """The peak of plain PyTorch's step, with SGD's momentum."""
    workload = make_workload(question["network"], question["batch"], question["image"], seed=question["seed"])
    return workload.peak_bytes(workload.model) + workload.parameter_bytes


class Trainer:
    """Trains one network, a step whenever it is asked to; in a process for one malloc, see `bench.processes`.

    The first question says what to train. "step" takes a step; "arena" asks what the arena came to, "most_bytes" how
    many bytes tensors used at once, the model's own included.
    """

    def __call__(self, question: Any, stage: Stage) -> Any:
        if question == "step":
            return self._step()
        if question == "most_bytes":
            return cpu_memory().most_in_use - self._in_use_bytes
        if question == "arena":
            arena = self._arena
            counts = {"departures": arena.departures, "replayed_steps": arena.replayed_steps}
            return {"arena_bytes": arena.bytes, "fragmentation": arena.fragmentation, **counts}
        self._before_bytes = psutil.Process().memory_info().rss
        self._in_use_bytes = cpu_memory().in_use
        self._workload = make_workload(question["network"], question["batch"], question["image"], seed=question["seed"])
        self._optimizer = torch.optim.SGD(self._workload.model.parameters(), lr=1e-3, momentum=0.9)
        self._model = self._workload.model
        if budget := question["budget_bytes"]:
            self._model = shoal.compile(self._model, budget, optimizer=self._optimizer, allow="bitwise")
        self._arena = Arena() if question["arena"] else None
        self._steps = 0
        gc.disable()  # a collection would add its time to whoever is being timed
        return None

    def _step(self) -> dict[str, Any]:
        torch.manual_seed(self._steps)
        self._steps += 1
        gc.collect()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        started, cpu_started = time.perf_counter(), time.process_time()
        with nullcontext() if self._arena is None else self._arena.step():
            loss = F.cross_entropy(self._model(self._workload.images), self._workload.target)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        held_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._before_bytes
        taken = {"seconds": seconds, "cpu_seconds": cpu_seconds, "faults": faults, "held_bytes": held_bytes}
        return taken | {"loss": loss.item().hex()}


def _run(run: Run) -> None:
    results: list[dict[str, Any]] = []
    for name, setting in run.chosen(SETTINGS, QUICK_SETTINGS).items():
        results.append(measure_network(name, setting, rounds=run.pick(ROUNDS, 1), seed=run.asked.seed))
        run.say(network_table(results[-1]))
        run.save(tunables=TUNABLES, networks=results)
    run.say("Losses equal bit for bit in every round")


main = Bench(
    _run,
    NETWORKS,
    quick="tiny inputs, one round: does it run?",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
