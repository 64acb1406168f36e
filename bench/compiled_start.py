"""Seconds until the second step of a network, in processes of their own: cold, then with what the first one left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.compiled_contenders import INDUCTOR, OURS
from bench.frame import WrongResult

STARTS = (INDUCTOR, *OURS)
_START = """
import resource, sys, time, torch
from bench.compiled import SETTINGS
from bench.compiled_contenders import by_inductor, workload_of
from torch._inductor.async_compile import shutdown_compile_workers
import shoal
torch.set_num_threads({threads})
work = workload_of({name!r}, SETTINGS[{name!r}], 0)
def processors():
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))
begun, in_use = time.perf_counter(), processors()
kernels = {kernels!r}
options = shoal.Options(kernels=kernels or "auto")
model = shoal.compile(work.shared_copy(), options=options) if kernels else by_inductor(work, None)
for _ in range(2):
    work.reset(); work.step(model)
seconds = time.perf_counter() - begun
shutdown_compile_workers()  # which then count as used
print(seconds, processors() - in_use)
"""


def start_seconds(name: str, who: str) -> dict[str, Any]:
    """Seconds until the second step of a process, with nothing on disk and then with what the first one left there.

    CPU time is that of all its processes and threads, the compilers' included.
    """
    kernels = None if who == INDUCTOR else who.split()[1]
    program = _START.format(name=name, threads=torch.get_num_threads(), kernels=kernels)
    row: dict[str, Any] = {"network": name, "who": who}
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "SHOAL_CACHE": f"{folder}/shoal"}
        for state in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[1],
                check=False,
            )
            if done.returncode:
                raise WrongResult(f"{name}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
            row[f"{state}_seconds"], row[f"{state}_cpu_seconds"] = map(float, done.stdout.split()[-2:])
    return row
