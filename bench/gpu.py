"""What one GPU shows in ten minutes: bench/gpu.sh runs these parts one by one, each in a process of its own.

    python -m bench.gpu --device cuda --part contract     one part; each row is written as soon as it is known
    python -m bench.gpu --device cuda --part verdict      one table of what the parts wrote
    python -m bench.gpu --device cuda --part speed --network gpt2 --batch 16 --contenders "plain PyTorch,Shoal at 100%"

environment  versions, the allocator, rates of the device and of its link, whether Triton runs
contract     ResNet-18 in half of its memory, float32: predicted, allocated, requested, reserved bytes; bits
speed        ResNet-50 or another network, bfloat16, channels_last: PyTorch, torch.compile, its setting
             activation_memory_budget, Shoal; kernels
wall         the device limited to what Shoal is given: who trains
offload      the link to the host, and what a step waits for it
triton       the tests that want a device: the kernels' numbers against their references, links, meters
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import torch
from rich.markup import escape

from bench.conditions import describe
from bench.frame import Bench, Run, WrongResult, comma_separated, option, some_of, use_exact_kernels
from bench.gpu_contenders import (
    Contender,
    compared,
    contenders,
    gradients_of,
    host_seconds,
    in_bfloat16,
    kernels_of,
    plan_row,
    planned_copy,
    warm_up,
    workload_of,
)
from bench.gpu_verdicts import RESERVED, short, verdicts
from bench.interleave import median_ratio
from bench.tables import new_table
from bench.workload import Workload
from shoal.core.files import write_json
from shoal.cost.measure import measure
from shoal.cost.measure_links import measure_links
from shoal.engine.options import Options
from shoal.kernels.norm.norm_sweeps_triton import TRITON_KERNELS
from shoal.offload.links.cuda_link import StreamCopy

MEASURED = ("environment", "contract", "speed", "wall", "offload", "triton")
PARTS = (*MEASURED, "verdict")
_GPU_TESTS = tuple(f"tests/{part}" for part in ("codecs", "core", "cost", "kernels", "memory", "offload"))
_KERNELS = 40  # rows for each contender
_PROFILED = 3  # contenders
_TO_PREPARE = 0.75  # of the time of `speed`; the rest is for all in turns


class Rows:
    """The rows of one part, written after each.

    Args:
        run: names the folder.
        part: names the file.
        seconds: after so many the part begins nothing new.
    """

    def __init__(self, run: Run, part: str, seconds: float) -> None:
        self._run, self._began, self._seconds = run, time.perf_counter(), seconds
        self.about: dict[str, Any] = {}  # all rows
        self._path = run.out / f"{part}.json"
        self._rows: list[dict[str, Any]] = []
        self._write()

    def add(self, **row: Any) -> dict[str, Any]:
        """Write a row, and print it."""
        self._rows.append(row)
        self._write()
        self._run.say("  ".join(f"{name}={short(name, value)}" for name, value in row.items()))
        return row

    def there_is_time(self, what: str, share: float = 1.0) -> bool:
        """Whether to go on with `what`, within this share of the time; if not, a row says that it was left out."""
        if time.perf_counter() - self._began < share * self._seconds:
            return True
        self.add(row=what, left_out=f"{share * self._seconds:.0f} seconds were over")
        return False

    def _write(self) -> None:
        about = {"conditions": self._run.conditions, "quick": self._run.asked.quick, **self.about}
        write_json(self._path, {**about, "rows": self._rows})


def environment(run: Run, rows: Rows) -> None:
    """What there is, and its rates."""
    rows.add(row="versions", **{key: run.conditions.get(key) for key in ("torch", "cuda", "cudnn", "python", "device")})
    free_bytes, memory_bytes = torch.cuda.mem_get_info()
    rows.add(
        row="memory",
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        allocator=torch.cuda.get_allocator_backend(),
        capability=".".join(map(str, torch.cuda.get_device_capability())),
    )
    rows.add(row="triton", runs=TRITON_KERNELS.run_on(run.device))
    device = measure(run.device, cache=False).device
    rows.add(
        row="rates",
        teraflops=device.flops_per_second / 1e12,
        gigabytes_per_second=device.bytes_per_second / 1e9,
        op_microseconds=device.launch_seconds * 1e6,
        launch_microseconds=device.host_launch_seconds * 1e6,
    )


def contract(run: Run, rows: Rows) -> None:
    """Bytes of each of the first steps, and bits: of ops one by one, since compiled regions have bits of their own."""
    use_exact_kernels()
    workload = workload_of(run, "resnet18", 64)
    plain_bytes = max(workload.peak_bytes(workload.model) for _ in range(2))
    rows.add(row="plain PyTorch", allocated_bytes=plain_bytes, budget_bytes=plain_bytes // 2)
    start = workload.buffers()
    eager = gradients_of(workload, workload.model, start)
    again = gradients_of(workload, workload.model, start)
    aot = gradients_of(workload, torch.compile(workload.shared_copy(), backend="aot_eager"), start)
    rows.add(row="plain PyTorch again", **compared(again, eager))
    rows.add(row="aot_eager", **compared(aot, eager))
    share = run.pick(0.5, 0.75)
    model = planned_copy(workload, plain_bytes, share, allow="bitwise")
    for number in range(5):
        workload.restore(start)
        allocated_bytes = workload.peak_bytes(model)
        stats, status = torch.cuda.memory_stats(), model.shoal
        metered = number < 3  # metering the first two steps and placing blocks in the third reset the peaks
        rows.add(
            row=f"step {number + 1}",
            predicted_bytes=status.predicted_peak_bytes,
            metered_bytes=status.measured_peak_bytes,
            allocated_bytes=None if metered else allocated_bytes,
            requested_bytes=None if metered else stats["requested_bytes.all.peak"],
            reserved_bytes=torch.cuda.max_memory_reserved(),
            budget_bytes=status.budget_bytes,
            repairs=status.repairs,
        )
    rows.add(row="Shoal against eager", **compared(gradients_of(workload, model, start), eager))
    exact = planned_copy(workload, plain_bytes, share, allow="bitwise", options=Options(kernels="eager"))
    for _ in range(2):
        ours = gradients_of(workload, exact, start)
    rows.add(row="Shoal op by op against eager", **compared(ours, eager))
    rows.add(row="Shoal op by op against aot_eager", **compared(ours, aot))


def speed(run: Run, rows: Rows) -> None:
    """Each contender alone as soon as it is ready, then all in turns; then what the first three run on the device."""
    asked = run.asked
    rows.about = {"network": asked.network, "batch": asked.batch, "image": asked.image}
    workload = workload_of(run, asked.network, asked.batch, asked.image)
    plain_bytes = max(workload.peak_bytes(in_bfloat16(workload.model)) for _ in range(2))
    ready: list[Contender] = []
    known = contenders(run, workload, plain_bytes)
    for name in some_of("--contenders", asked.contenders or list(known), known):
        make = known[name]
        if not rows.there_is_time(name, _TO_PREPARE):
            continue
        try:
            contender = make()
            began = time.perf_counter()
            warm_up(workload, contender, 3)
            preparing_seconds = time.perf_counter() - began
            seconds = [workload.seconds(contender.forward) for _ in range(run.pick(5, 2))]
        except Exception as error:  # a contender that cannot run is a row, not the end of the part
            rows.add(row=name, error=_first_line(error))
            continue
        ready.append(contender)
        rows.add(
            row=name,
            alone_ms=1e3 * statistics.median(seconds),
            samples_per_second=len(workload.images) / statistics.median(seconds),
            peak_bytes=workload.peak_bytes(contender.forward) + contender.graph_bytes,
            reserved_bytes=torch.cuda.max_memory_reserved(),
            preparing_seconds=preparing_seconds,
            **plan_row(contender.model),
        )
    if len(ready) > 1 and rows.there_is_time("in turns"):
        found = workload.in_turns({one.name: one.forward for one in ready}, run.pick(7, 2))
        for name, each in found.items():
            rows.add(
                row="in turns",
                contender=name,
                ms=1e3 * statistics.median(each),
                of_plain=median_ratio(each, found[ready[0].name]),
            )
    for contender in ready[:_PROFILED]:
        if rows.there_is_time(f"kernels of {contender.name}"):
            _profile(rows, workload, contender, run.pick(5, 2))


def _profile(rows: Rows, workload: Workload, contender: Contender, rounds: int) -> None:
    """Rows of the slowest kernels of a step, and of how long the host takes to ask for it."""
    host_ms = [1e3 * host_seconds(workload, contender.forward) for _ in range(rounds)]
    found = kernels_of(workload, contender.forward)
    rows.add(
        row="device",
        contender=contender.name,
        host_ms=statistics.median(host_ms),
        kernels_ms=sum(milliseconds for _, milliseconds in found.values()),
        launches=sum(launches for launches, _ in found.values()),
    )
    for kernel, (launches, milliseconds) in list(found.items())[:_KERNELS]:
        rows.add(row="kernel", contender=contender.name, kernel=kernel[:90], launches=launches, ms=milliseconds)


def wall(run: Run, rows: Rows) -> None:
    """Plain PyTorch and Shoal where the device has what the allocator may reserve for the budget."""
    workload = workload_of(run, "resnet50", 128)
    plain_bytes = max(workload.peak_bytes(in_bfloat16(workload.model)) for _ in range(2))
    budget_bytes = int(run.pick(0.4, 0.75) * plain_bytes)
    model = planned_copy(workload, plain_bytes, run.pick(0.4, 0.75), allow="bitwise")
    torch.cuda.empty_cache()
    wall_bytes = int(RESERVED * budget_bytes)
    torch.cuda.set_per_process_memory_fraction(wall_bytes / torch.cuda.get_device_properties(run.device).total_memory)
    for name, forward in (("plain PyTorch", in_bfloat16(workload.model)), ("Shoal", in_bfloat16(model))):
        steps, error = 0, ""
        try:
            for _ in range(3):
                workload.reset()
                workload.step(forward)
                steps += 1
        except torch.OutOfMemoryError as ran_out:
            error = _first_line(ran_out)
        workload.reset()
        torch.cuda.empty_cache()
        rows.add(row=name, steps=steps, wall_bytes=wall_bytes, budget_bytes=budget_bytes, error=error)
    rows.add(row="repairs", repairs=model.shoal.repairs, reserved_bytes=torch.cuda.max_memory_reserved())


def offload(run: Run, rows: Rows) -> None:
    """The link's rates, and what a planned step waits for it."""
    for link in measure_links(run.device, cache=False):
        rows.add(
            row=link.name,
            to_host_gigabytes_per_second=link.to_host_bytes_per_second / 1e9,
            to_device_gigabytes_per_second=link.to_device_bytes_per_second / 1e9,
        )
    workload = workload_of(run, "resnet50", 128)
    plain = in_bfloat16(workload.model)
    plain_bytes = max(workload.peak_bytes(plain) for _ in range(2))
    model = planned_copy(workload, plain_bytes, run.pick(0.6, 0.75), allow="offload")
    forward = in_bfloat16(model)
    warm_up(workload, Contender("Shoal", forward), 3)
    found = workload.in_turns({"plain": plain, "offload": forward}, run.pick(7, 2))
    waited: list[StreamCopy] = []
    wait = StreamCopy.wait

    def noting(copy: StreamCopy) -> None:
        waited.append(copy)
        wait(copy)

    with mock.patch.object(StreamCopy, "wait", noting):
        workload.seconds(forward)
    plan = model.shoal.plan
    rows.add(
        row="offload",
        offloaded_bytes=sum(storage.nbytes for storage in plan.offloaded),
        plain_ms=1e3 * statistics.median(found["plain"]),
        kept_ms=1e3 * plan.plain_seconds,
        predicted_ms=1e3 * plan.predicted_seconds,
        measured_ms=1e3 * statistics.median(found["offload"]),
        predicted_stall_ms=1e3 * plan.timeline.stall_seconds,
        measured_stall_ms=1e3 * sum(copy.stalled_seconds() for copy in waited),
        predicted_bytes=model.shoal.predicted_peak_bytes,
        allocated_bytes=workload.peak_bytes(forward),
        repairs=model.shoal.repairs,
    )


def triton(run: Run, rows: Rows) -> None:
    """The tests that want a device, of Triton's kernels first of all, side by side where pytest-xdist is installed.

    With --quick they are only collected.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *_GPU_TESTS]
    beside = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    log = run.out / "triton-tests.txt"
    with log.open("w") as file:  # what has run is there where the part ends early
        done = subprocess.run(
            [*command, "-o", "addopts=--import-mode=importlib", *run.pick(beside, ["--collect-only"])],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    counted = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error|skipped)", log.read_text())}
    rows.add(row="tests", exit_code=done.returncode, **counted)


def verdict(run: Run, rows: Rows) -> None:
    """One line for each thing that was to be shown."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for part in MEASURED:
        path = run.out / f"{part}.json"
        parts[part] = json.loads(path.read_text())["rows"] if path.exists() else []
    table = new_table(describe(run.conditions), "<part | <what | <found | <verdict", title_justify="left")
    for part, what, found, holds in verdicts(parts):
        word = ("figure" if found else "not measured") if holds is None else "holds" if holds else "DOES NOT HOLD"
        rows.add(row=what, part=part, found=found, verdict=word)
        table.add_row(part, what, escape(found), word)
    run.say(table)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _main(run: Run) -> None:
    if run.device.type != "cuda":
        raise WrongResult("it measures a CUDA device; give --device cuda")
    part = run.asked.part
    globals()[part](run, Rows(run, part, run.asked.seconds))


main = Bench(
    _main,
    option("--part", required=True, choices=PARTS, help="which part"),
    option(
        "--network", default="resnet50", minimum=None, help="of `speed`: of the zoo, `timm/` and one of timm's, or gpt2"
    ),
    option("--batch", type=int, default=128, help="its images, or sequences"),
    option("--image", type=int, default=224, help="their pixels along each side, or tokens"),
    option("--contenders", type=comma_separated, minimum=None, help="of `speed`: comma-separated; by default all"),
    option("--seconds", type=float, default=600.0, help="after which the part begins nothing new"),
    quick="tiny networks: does it run?",
    device=True,
    header=False,
    out="runs/gpu",
)

if __name__ == "__main__":
    sys.exit(main())
