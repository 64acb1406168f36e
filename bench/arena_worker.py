"""A process that trains one network and takes a step whenever it is told to; see `bench.arena`.

Malloc is tuned from the environment when a process starts, so each contender has its own, and they take turns.
One line of JSON comes in, `{"network", "batch", "image", "seed", "arena"}`; then a line "step" for each step, which is
answered with `{"seconds", "cpu_seconds", "faults", "loss"}`; at the end of the input, what the arena came to.
"""

from __future__ import annotations

import gc
import json
import logging
import resource
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from bench.cpu_arena.arena import Arena
from bench.workload import make_workload


def main() -> int:
    """Serve until the input ends."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    workload = make_workload(asked["network"], asked["batch"], asked["image"], seed=asked["seed"])
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)
    arena = Arena() if asked["arena"] else None
    gc.disable()  # a collection would hit whoever is being timed
    for number, _ in enumerate(sys.stdin):
        torch.manual_seed(number)
        gc.collect()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        started, cpu_started = time.perf_counter(), time.process_time()
        with nullcontext() if arena is None else arena.step():
            loss = F.cross_entropy(workload.model(workload.images), workload.target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        _say({"seconds": seconds, "cpu_seconds": cpu_seconds, "faults": faults, "loss": loss.item().hex()})
    if arena is not None:
        counts = {"departures": arena.departures, "replayed_steps": arena.replayed_steps}
        _say({"arena_bytes": arena.bytes, "fragmentation": arena.fragmentation, **counts})
    return 0


def _say(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    sys.exit(main())
