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
each storage once, without parameters and batch; "peak" is all of a step, in bytes of tensors: what an arena holds is
said below the table. Times are medians over the rounds, speedups medians of ratios within a round. GFLOP/s are eager's
FLOPs by a contender's time. Rows that lose stay; a target that is missed is printed as such.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

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
from bench.frame import WrongResult, bar, comma_separated, conditions, describe, file_name, make_console, make_folder
from bench.same_training import FLOAT32, FLOAT64
from shoal.app import models
from shoal.core.files import write_json
from shoal.errors import InputError

NETWORKS = ("densenet121", "resnet50")
BATCH, IMAGE, ROUNDS = 16, 224, 7
QUICK_BATCH, QUICK_IMAGE = 2, 64
ZOO_BATCH, ZOO_IMAGE = 4, 96
ZOO_SETTINGS = {"unet3d": (1, 32)}
QUICK_LIMIT_SIDE = 768
TUNABLES = {
    DEFAULT_MALLOC: "",
    TUNED_MALLOC: "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736:"
    "glibc.malloc.arena_max=1",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 unless a training was wrong (1) or an argument was (2). A target that is missed is no failure."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except (InputError, WrongResult) as error:
        print(f"bench.batchnorm: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _run(asked: argparse.Namespace) -> int:
    runs = list(wanted(asked))
    mallocs = _known("--mallocs", asked.mallocs, TUNABLES)
    out = make_folder(asked.out)
    console = make_console()
    path = out / file_name("batchnorm_zoo" if asked.zoo else "batchnorm", torch.device("cpu"))
    cores = conditions(torch.device("cpu"), 0)["cores"]
    found: dict[str, Any] = {"tunables": TUNABLES, "results": [], "verdicts": []}
    with bar(len(runs) * len(mallocs)) as show:
        for malloc in mallocs:
            of_malloc = []
            for run in runs:
                who = f"{run.network}, {malloc} malloc"
                result = {"malloc": malloc, **in_a_process(run, malloc, partial(show, who))}
                result["conditions"]["cores"] = cores  # a pinned process sees one
                show(who, "done", 1)
                of_malloc.append(result)
                found["results"].append(result)
                if not asked.zoo:
                    _print_steps(console, result)
                write_json(path, found)
            if asked.zoo:
                console.print(describe(of_malloc[0]["conditions"]), highlight=False, markup=False)
                console.print(zoo_table(of_malloc))
    found["verdicts"] = [zoo_verdict(found["results"])] if asked.zoo else verdicts(found["results"])
    write_json(path, found)
    for line in (*without_tunables(found["results"]), *map(verdict_line, found["verdicts"])):
        console.print(line, highlight=False, markup=False)
    console.print(
        f"Held against eager in float32: {FLOAT32}; fused networks in float64: {FLOAT64}. Figures in {path}",
        highlight=False,
        markup=False,
    )
    return 0


def wanted(asked: argparse.Namespace) -> Iterator[Asked]:
    """What to measure, one network after the other.

    Raises:
        InputError: an argument is out of its range, or names what there is not.
    """
    for option in ("batch", "image", "rounds", "threads"):
        value = getattr(asked, option)
        if value is not None and value < 1:
            raise InputError(f"--{option} {value}: give 1 or more")
    if asked.zoo and asked.contenders is not None:
        raise InputError("--contenders is for whole steps; --zoo compares eager and the default level")
    names = (
        asked.networks
        if asked.networks is not None
        else (models.names() if asked.zoo else NETWORKS[: 1 if asked.quick else None])
    )
    _known("--networks", names, models.names())
    usual = ZOO if asked.zoo else QUICK if asked.quick else DEFAULT
    contenders = usual if asked.contenders is None else asked.contenders
    _known("--contenders", contenders, CONTENDERS)
    both = {"none": (False,), "all": (True,), "both": (False, True)}[asked.pool_first]
    for name in names:
        batch, image = (QUICK_BATCH, QUICK_IMAGE) if asked.quick else (BATCH, IMAGE)
        if asked.zoo:
            batch, image = ZOO_SETTINGS.get(name, (batch, image) if asked.quick else (ZOO_BATCH, ZOO_IMAGE))
        batch, image = asked.batch or batch, asked.image or image
        models.example_shape(name, batch, image)
        for first in both:
            yield Asked(
                network=name,
                batch=batch,
                image=image,
                contenders=(EAGER, *(one for one in contenders if one != EAGER)),
                rounds=asked.rounds or (1 if asked.quick else ROUNDS),
                threads=asked.threads or torch.get_num_threads(),
                pool_first=first,
                **({"limit_side": QUICK_LIMIT_SIDE} if asked.quick else {}),
            )


def in_a_process(run: Asked, malloc: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """What a process of its own measures under one of `TUNABLES`.

    Raises:
        WrongResult: a contender trains otherwise than eager PyTorch.
        InputError: the process ended without an answer, or cannot do what was asked.
    """
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "bench.batchnorm_worker"]
        under = environment(TUNABLES[malloc], run.threads, os.environ)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=under) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(asdict(run)) + "\n")
                process.stdin.close()
                for line in process.stdout:
                    answer = json.loads(line)
                    if "result" in answer:
                        return answer["result"]
                    if "wrong" in answer:
                        raise WrongResult(answer["wrong"])
                    if "input" in answer:
                        raise InputError(answer["input"])
                    tell(answer["tell"])
            finally:
                process.kill()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"the process of {run.network} with {malloc} malloc ended: {last}")


def environment(tunables: str, threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a process runs under: no settings of malloc but `tunables`, its threads pinned unless told otherwise.

    >>> environment("", 2, {"MALLOC_ARENA_MAX": "1", "HOME": "/"})
    {'HOME': '/', 'OMP_PROC_BIND': 'true', 'OMP_NUM_THREADS': '2'}
    """
    kept = {
        name: value for name, value in inherited.items() if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
    }
    kept.setdefault("OMP_PROC_BIND", "true")
    kept["OMP_NUM_THREADS"] = str(threads)
    return {**kept, **({"GLIBC_TUNABLES": tunables} if tunables else {})}


def _known(option: str, names: Sequence[str], known: Sequence[str] | Mapping[str, Any]) -> Sequence[str]:
    """`names`, each of which is known.

    Raises:
        InputError: one is not.
    """
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InputError(f"{option} {','.join(unknown or ['nothing'])}: give some of {', '.join(known)}")
    return names


def _print_steps(console: Console, result: Mapping[str, Any]) -> None:
    console.print(describe(result["conditions"]), highlight=False, markup=False)
    console.print(step_table(result))
    for note in notes(result):
        console.print(note, highlight=False, markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.batchnorm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", type=comma_separated, help=f"default: {', '.join(NETWORKS)}; --zoo: all")
    parser.add_argument("--batch", type=int, help=f"images; default: {BATCH}, --zoo {ZOO_BATCH}")
    parser.add_argument("--image", type=int, help=f"pixels along each side; default: {IMAGE}, --zoo {ZOO_IMAGE}")
    parser.add_argument("--contenders", type=comma_separated, help="of " + ", ".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, help=f"steps of each that count; default: {ROUNDS}")
    parser.add_argument("--threads", type=int, help="of OpenMP; default: as PyTorch has here")
    parser.add_argument("--mallocs", type=comma_separated, default=list(TUNABLES), help="of " + ", ".join(TUNABLES))
    parser.add_argument(
        "--pool-first",
        nargs="?",
        const="all",
        default="none",
        choices=("none", "all", "both"),
        help="average pools before 1x1 convolutions, for all contenders or none; both: one after the other",
    )
    parser.add_argument("--zoo", action="store_true", help="every network at its default level against eager")
    parser.add_argument("--quick", action="store_true", help="small images, one round, nothing that compiles")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
