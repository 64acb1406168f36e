"""Whole training steps with and without an arena, against glibc's malloc as it comes and tuned by hand.

    OMP_NUM_THREADS=1 python -m bench.arena          ten minutes
    python -m bench.arena --quick                    tiny inputs, to see that it runs

A step is forward, cross entropy, backward, SGD with momentum and `zero_grad`, in plain eager PyTorch, channels_last
float32. Each contender is a process of its own, since malloc is tuned when a process starts. They take turns, one step
each, in rounds that start one further every time; one runs at a time. CPU time tells more than the clock where others
run on the same cores. The losses of a round must be equal to the last bit. The first steps, which the arena records and
then lays out, are warm-up for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from rich.table import Table

from bench.frame import WrongResult, comma_separated, conditions, describe, file_name, make_console, make_folder
from bench.network import Setting
from bench.tables import new_table
from shoal.core.files import write_json
from shoal.core.sizes import format_bytes
from shoal.errors import InputError

SETTINGS = {  # about a second a step on one thread
    "resnet50": Setting(batch=2, image=224),
    "vgg16_bn": Setting(batch=1, image=224),
    "mobilenet_v2": Setting(batch=8, image=224),
    "densenet121": Setting(batch=2, image=224),
}
QUICK_SETTINGS = {name: Setting(2, 32) for name in SETTINGS}
_NEVER_UNMAPPED = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736:glibc.malloc.arena_max=1"
DEFAULT, TUNED, HUGE, ARENA = "malloc", "malloc, tuned", "malloc, tuned, huge pages", "arena"
TUNABLES = {DEFAULT: "", TUNED: _NEVER_UNMAPPED, HUGE: f"{_NEVER_UNMAPPED}:glibc.malloc.hugetlb=1", ARENA: ""}
WARM_UPS = 4
ROUNDS = 9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 unless a loss differed."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except (InputError, WrongResult) as error:
        print(f"bench.arena: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _run(asked: argparse.Namespace) -> int:
    settings = QUICK_SETTINGS if asked.quick else SETTINGS
    names = asked.networks or list(settings)
    for name in names:
        if name not in settings:
            raise InputError(f"unknown network {name!r}; known are {', '.join(settings)}")
    device = torch.device("cpu")
    found_conditions = conditions(device, asked.seed)
    out = make_folder(asked.out)
    console = make_console()
    console.print(describe(found_conditions), highlight=False, markup=False)
    path = out / file_name("arena", device)
    results = []
    for name in names:
        results.append(measure_network(name, settings[name], rounds=1 if asked.quick else ROUNDS, seed=asked.seed))
        console.print(_table(results[-1]))
        write_json(path, {"conditions": found_conditions, "tunables": TUNABLES, "networks": results})
    console.print(f"Losses equal bit for bit in every round. Figures in {path}", highlight=False)
    return 0


def measure_network(name: str, setting: Setting, *, rounds: int, seed: int) -> dict[str, Any]:
    """Every contender's steps on one network, in turns.

    Raises:
        WrongResult: the losses of a round differ.
    """
    contenders = list(TUNABLES)
    taken: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    with ExitStack() as stack:
        workers = {contender: stack.enter_context(_worker(contender, name, setting, seed)) for contender in contenders}
        for turn in range(WARM_UPS + rounds):
            first = turn % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                taken[contender].append(workers[contender].step())
            losses = {contender: steps[-1]["loss"] for contender, steps in taken.items()}
            if len(set(losses.values())) != 1:
                raise WrongResult(f"{name}, step {turn + 1}: the losses differ: {losses}")
        arena = workers[ARENA].end()
    rows = {}
    for contender, steps in taken.items():
        timed = steps[WARM_UPS:]
        rows[contender] = {
            "seconds": [step["seconds"] for step in timed],
            "cpu_seconds": [step["cpu_seconds"] for step in timed],
            "faults": [step["faults"] for step in timed],
            "warm_up_seconds": [step["seconds"] for step in steps[:WARM_UPS]],
        }
    return {"network": name, "setting": asdict(setting), "rows": rows, "arena": arena}


class _Worker:
    """The process of one contender."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process = process
        self._errors = errors

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def step(self) -> dict[str, Any]:
        self.tell("step")
        return self._answer()

    def end(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["no reason given"])[-1]
            raise InputError(f"a contender's process ended: {last}")
        return json.loads(line)


@contextmanager
def _worker(contender: str, network: str, setting: Setting, seed: int) -> Iterator[_Worker]:
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "bench.arena_worker"]
        environment = _environment(TUNABLES[contender], os.environ)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment) as process:
            try:
                worker = _Worker(process, errors)
                asked = {"network": network, "batch": setting.batch, "image": setting.image, "seed": seed}
                worker.tell(json.dumps({**asked, "arena": contender == ARENA}))
                yield worker
            finally:
                process.kill()


def _environment(tunables: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a worker runs under: no settings of malloc but `tunables`, and as many threads as this process.

    >>> _environment("", {"MALLOC_ARENA_MAX": "1", "HOME": "/"})["HOME"]
    '/'
    """
    kept = {
        name: value for name, value in inherited.items() if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
    }
    return {
        **kept,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        **({"GLIBC_TUNABLES": tunables} if tunables else {}),
    }


def _table(result: Mapping[str, Any]) -> Table:
    setting, arena, rows = result["setting"], result["arena"], result["rows"]
    table = new_table(
        f"{result['network']}, {setting['batch']} x {setting['image']} pixels: arena of "
        f"{format_bytes(arena['arena_bytes'])}, {arena['fragmentation']:.3f} of the most in use, "
        f"{arena['departures']} departures in {arena['replayed_steps']} replayed steps",
        "< | a step | of the arena's | CPU time | of the arena's | page faults a step",
    )
    with_arena, cpu_with_arena = median(rows[ARENA]["seconds"]), median(rows[ARENA]["cpu_seconds"])
    for contender, row in rows.items():
        table.add_row(
            contender,
            f"{median(row['seconds']):.3f} s",
            f"{median(row['seconds']) / with_arena:.2f}",
            f"{median(row['cpu_seconds']):.3f} s",
            f"{median(row['cpu_seconds']) / cpu_with_arena:.2f}",
            f"{median(row['faults']):.0f}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.arena", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", type=comma_separated, help="comma-separated; by default all")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, one round: does it run?")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
