"""BN fission-n-fusion, whole training steps: figure 7 of the paper, its figures beside ours, and what a user gets.

    python -m bench.batchnorm                        DenseNet-121 and ResNet-50, 16 x 224 pixels; most of it compiles
    python -m bench.batchnorm --pool-first both      and once more with the pools before the 1x1 convolutions, for all
    python -m bench.batchnorm --zoo                  every network at its default level against eager, small images
    python -m bench.batchnorm --quick                small images, one round, nothing that compiles: does it run?

A step is forward, cross entropy, backward in channels_last float32. Contenders: eager, Inductor, `fuse_batchnorm` at
each level (`when="always"`), and `shoal.compile` without a budget, plain and fused, its steps in an arena. All of a
table take turns in one process; each network has a process for each malloc, with OpenMP's threads pinned: glibc's
malloc as it comes maps, faults in and unmaps every large activation in every step, so a speedup of kernels has to be
held against the tuned one.
Before anything is timed each contender's outputs, gradients and running statistics are held against eager's in float32,
and those of the fused networks in float64 on small images. "saved" is what the network saves for its backward pass,
each storage once, without parameters and batch; "peak" is all of a step, in bytes of tensors; what an arena holds
stands below the table. Times are medians over the rounds, speedups medians of ratios within a round. GFLOP/s are
eager's FLOPs by a contender's time. Rows that lose stay; a target that is missed is printed as such.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from bench.batchnorm_contenders import CONTENDERS, DEFAULT, EAGER, QUICK, ZOO, Asked
from bench.batchnorm_tables import (
    DEFAULT_MALLOC,
    TUNED_MALLOC,
    notes,
    step_table,
    verdict_line,
    verdicts,
    without_tunables,
    zoo_table,
    zoo_verdict,
)
from bench.conditions import describe, file_name
from bench.frame import Bench, Run, bar, option, switch
from bench.processes import HUGE_PAGES, NEVER_UNMAPPED, Ended, Worker, malloc_environment
from bench.reference import FLOAT32, FLOAT64
from examples import networks as models
from shoal.errors import InputError

NETWORKS = ("densenet121", "resnet50")
BATCH, IMAGE, ROUNDS = 16, 224, 7
QUICK_BATCH, QUICK_IMAGE = 2, 64
ZOO_BATCH, ZOO_IMAGE = 4, 96
ZOO_SETTINGS = {"unet3d": (1, 32)}
QUICK_LIMIT_SIDE = 768
TUNABLES = {DEFAULT_MALLOC: "", TUNED_MALLOC: f"{HUGE_PAGES}:{NEVER_UNMAPPED}"}


def wanted(run: Run) -> Iterator[Asked]:
    """What to measure, one network after the other.

    Raises:
        InputError: an argument is out of its range, or is an unknown name.
    """
    asked = run.asked
    if asked.zoo and asked.contenders is not None:
        raise InputError("--contenders is for whole steps; --zoo compares eager and the default level")
    names = asked.networks or (models.names() if asked.zoo else run.pick(NETWORKS, NETWORKS[:1]))
    contenders = asked.contenders or (ZOO if asked.zoo else run.pick(DEFAULT, QUICK))
    usual = run.pick((BATCH, IMAGE), (QUICK_BATCH, QUICK_IMAGE))
    for name in names:
        batch, image = ZOO_SETTINGS.get(name, run.pick((ZOO_BATCH, ZOO_IMAGE), usual)) if asked.zoo else usual
        batch, image = asked.batch or batch, asked.image or image
        models.example_shape(name, batch, image)
        for first in {"none": (False,), "all": (True,), "both": (False, True)}[asked.pool_first]:
            yield Asked(
                network=name,
                batch=batch,
                image=image,
                contenders=(EAGER, *(one for one in contenders if one != EAGER)),
                rounds=asked.rounds or run.pick(ROUNDS, 1),
                threads=asked.threads or torch.get_num_threads(),
                pool_first=first,
                **({"limit_side": QUICK_LIMIT_SIDE} if asked.quick else {}),
            )


def in_a_process(asked: Asked, malloc: str, stage: Callable[[str], None]) -> dict[str, Any]:
    """What a process of its own measures under one of `TUNABLES`.

    Raises:
        WrongResult: a contender trains otherwise than eager PyTorch.
        InputError: the process ended without an answer, or cannot do what was asked.
    """
    environment = malloc_environment(TUNABLES[malloc], asked.threads, os.environ, pinned=True)
    with Worker("bench.batchnorm_steps:answer", environment) as worker:
        try:
            return worker.ask(asdict(asked), stage)
        except Ended as error:
            reason = f"the process of {asked.network} with {malloc} malloc ended: {error.reason}"
            raise InputError(reason) from None


def _run(run: Run) -> None:
    runs, zoo = list(wanted(run)), run.asked.zoo
    if zoo:
        run.path = run.out / file_name("batchnorm_zoo", run.device)
    results: list[dict[str, Any]] = []
    run.result = {"tunables": TUNABLES, "results": results, "verdicts": []}
    with bar(len(runs) * len(run.asked.mallocs)) as show:
        for malloc in run.asked.mallocs:
            of_malloc = []
            for one in runs:
                who = f"{one.network}, {malloc} malloc"
                result = {"malloc": malloc, **in_a_process(one, malloc, partial(show, who))}
                result["conditions"]["cores"] = run.conditions["cores"]  # a pinned process sees one
                show(who, "done", 1)
                of_malloc.append(result)
                results.append(result)
                if not zoo:
                    run.say(describe(result["conditions"]), step_table(result), *notes(result))
                run.save()
            if zoo:
                run.say(describe(of_malloc[0]["conditions"]), zoo_table(of_malloc))
    found = [zoo_verdict(results)] if zoo else verdicts(results)
    run.save(verdicts=found)
    run.say(*without_tunables(results), *map(verdict_line, found))
    run.say(f"Held against eager in float32: {FLOAT32}; fused networks in float64: {FLOAT64}")


main = Bench(
    _run,
    option("--networks", known=models.names(), help=f"default: {', '.join(NETWORKS)}; --zoo: all"),
    option("--batch", type=int, help=f"images; default: {BATCH}, --zoo {ZOO_BATCH}"),
    option("--image", type=int, help=f"pixels along each side; default: {IMAGE}, --zoo {ZOO_IMAGE}"),
    option("--contenders", known=CONTENDERS),
    option("--rounds", type=int, help=f"steps of each that count; default: {ROUNDS}"),
    option("--threads", type=int, help="of OpenMP; default: as PyTorch has here"),
    option("--mallocs", known=TUNABLES, default=list(TUNABLES)),
    option(
        "--pool-first",
        nargs="?",
        const="all",
        default="none",
        choices=("none", "all", "both"),
        help="average pools before 1x1 convolutions, for all contenders or none; both: one after the other",
    ),
    switch("--zoo", "every network at its default level against eager"),
    quick="small images, one round, nothing that compiles",
    header=False,
)

if __name__ == "__main__":
    sys.exit(main())
