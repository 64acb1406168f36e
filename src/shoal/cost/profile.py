"""Times and workspaces of ops on this machine: each distinct op of a step runs in isolation, once per signature.

The step itself does not run, and the model's tensors, the random number generators and the grad mode do not change.
Results are cached on disk per machine.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import fx
from torch.utils._pytree import tree_leaves

from shoal.capture.captured import Captured
from shoal.core.progress import doing
from shoal.core.records import read_value
from shoal.core.step import StepGraph
from shoal.cost import measurement_cache
from shoal.cost.device_clock import DeviceClock
from shoal.cost.in_turns import InTurns, Timing
from shoal.cost.kernel_selection import select_kernels
from shoal.cost.random_operands import OperandFactory
from shoal.errors import InputError
from shoal.graph import inplace
from shoal.graph.op_counts import moved_bytes, target_name
from shoal.lowlevel import allocations
from shoal.lowlevel.torch_internals import isolated
from shoal.memory.cpu_allocator import release_unused

# A first run that takes longer is a time too: what it selects is a small part of it. With this and two runs (see
# `in_turns`) instead of 20 ms and three, the 143 ops of ResNet-50 add up to 1.26 to 1.29 instead of 1.24 s.
_FIRST_COUNTS_SECONDS = 0.005
_LONGEST_SECONDS = 3600.0  # of one op; a longer cached time is ignored
_UNDISTURBED_SECONDS = 1e-3  # the fastest of runs as short as this was not interrupted; processor clocks are coarser
_SLOW_SECONDS = 0.5  # an op whose first run takes longer is timed once


@dataclass(frozen=True)
class Costs:
    """Measured costs by op signature, as `StepGraph.with_costs` takes them.

    Attributes:
        seconds: the fastest of its runs, its allocations and their release included, and on the CPU the time left out
            in which other processes had the core. On CUDA what it takes on the device, without its launch.
        workspace_bytes: its peak beyond operands and results.
        launch_seconds: what the host takes to launch it on CUDA; empty on the CPU.
    """

    seconds: Mapping[str, float]
    workspace_bytes: Mapping[str, int]
    launch_seconds: Mapping[str, float] = field(default_factory=dict)


class _Cost(NamedTuple):
    """What one op takes; `launch_seconds` of the host, while the device computes something else."""

    kernel_seconds: float
    workspace_bytes: int
    launch_seconds: float = 0.0


def profile(
    nodes: Mapping[str, fx.Node],
    *,
    device: str | torch.device = "cpu",
    progress: bool | None = None,
    cache: bool = True,
    budget_seconds: float | None = None,
    subject: str = "costs",
) -> Costs:
    """Time each op in isolation, on random operands of its shapes, strides and dtypes.

    The first run warms up (kernel selection, oneDNN primitives) and shows the workspace; its time counts where it is
    long. Then the op runs until a second run confirms the fastest within 3 %, or two runs took 3 ms, or all took 60 ms:
    one or two runs of a large op, a few more of a small one. The fastest counts: other load only adds time.

    Between runs on the CPU other memory goes through the caches of its cores, as other ops' does in a step; where
    operands and results are larger than 1 MiB, through the cache that cores share as well: ops of a step are timed in
    turns. A slice of a batch that is read again after all other slices does not lie there any more.

    An op that may write over an operand is timed doing so, as it does in nearly every planned step: where the system
    has to hand out the pages of a large result first, as with torch's allocator on the CPU, these cost as much as a
    pointwise op itself.

    A profiler that runs on this thread sees none of it on the CPU: ops are timed on another thread then.

    On CUDA what the device computes and what the host takes to launch it are measured apart
    (`shoal.cost.device_clock`): in a step, launches go on while long kernels run.

    Args:
        nodes: signature → a `call_function` node of that signature, operands with FakeTensors in `meta["val"]`. Any
            callable may be its target.
        device: "cpu" or "cuda"; the fake tensors may be of another.
        progress: show a bar on stderr; None: only on a terminal, and not together with the line of
            `shoal.core.progress`.
        cache: read and write the times cached for this machine (folder `subject` of `shoal.core.files.cache_dir()`).
        budget_seconds: after that time, each remaining op is timed once.
        subject: under which the times are cached.

    Returns:
        Costs of every op that ran. One that cannot run in isolation is left out, with a warning.

    Raises:
        InputError: the device is not available.

    Limits: on the CPU an op is quicker in a step where it reads what was written right before. Values are random, so
    times of ops that depend on values (sorting, sparse indexing) are only indicative.
    """
    place = measurement_cache.device_of(device)
    found = _readable(measurement_cache.recall(subject, place, nodes)) if cache else {}
    missing = {key: node for key, node in nodes.items() if key not in found}
    measured: dict[str, _Cost] = {}

    def measure() -> None:
        with isolated(place), _bar(missing, progress) as advance:
            if missing:
                _measure_each(missing, place, measured, advance, budget_seconds)
            _device_clock.cache_clear()  # it holds memory of the device
            select_kernels(nodes, place)

    try:
        if missing and place.type == "cpu":
            allocations.unprofiled(measure)
        else:
            measure()
    finally:
        if missing and place.type == "cpu":
            release_unused()  # operands and results are of no step
        if cache and measured:
            measurement_cache.remember(subject, place, {key: list(value) for key, value in measured.items()})
    return _as_costs(found | measured)


def recalled(nodes: Mapping[str, fx.Node], *, device: str | torch.device = "cpu") -> Costs:
    """Those of `profile` that were measured before, on this machine; nothing runs."""
    return _as_costs(_readable(measurement_cache.recall("costs", measurement_cache.device_of(device), nodes)))


def _as_costs(found: Mapping[str, _Cost]) -> Costs:
    return Costs(
        seconds={key: cost.kernel_seconds for key, cost in found.items()},
        workspace_bytes={key: cost.workspace_bytes for key, cost in found.items()},
        launch_seconds={key: cost.launch_seconds for key, cost in found.items() if cost.launch_seconds},
    )


def _measure_each(
    missing: Mapping[str, fx.Node],
    place: torch.device,
    measured: dict[str, _Cost],
    advance: Callable[[str], None],
    budget_seconds: float | None,
) -> None:
    operands = OperandFactory(place)
    turns = InTurns(operands)
    deadline = time.perf_counter() + (float("inf") if budget_seconds is None else budget_seconds)

    def keep(complete: Iterable[tuple[str, Timing | Exception]]) -> None:
        for key, timing in complete:
            if isinstance(timing, Timing):
                measured[key] = _Cost(timing.seconds, timing.workspace_bytes, timing.launch_seconds)
            else:
                reason = str(timing).strip().splitlines()[0] if str(timing).strip() else type(timing).__name__
                warnings.warn(f"cannot time {key}: {reason}; its time stays an estimate", stacklevel=4)

    for key, node in missing.items():
        advance(target_name(node.target))
        try:
            timing = _begin(node, operands, hurry=time.perf_counter() > deadline)
        except Exception as error:
            keep([(key, error)])
        else:
            keep(turns.add(key, timing))
    keep(turns.rest())


def profile_step(captured: Captured, device: torch.device) -> StepGraph:
    """The captured step with the measured times and workspaces of its ops; see `profile`."""
    nodes = captured.distinct_nodes()
    costs = profile(nodes, device=device)
    written = captured.read_with.as_written
    others = {} if written is None else {k: node for k, node in written.distinct_nodes().items() if k not in nodes}
    workspace_bytes = {**_workspace_bytes(others, device), **costs.workspace_bytes}
    return captured.with_costs(costs.seconds, workspace_bytes, costs.launch_seconds)


def _workspace_bytes(nodes: Mapping[str, fx.Node], device: torch.device) -> Mapping[str, int]:
    """The workspaces of ops that no planned step runs, so that their times may be rough, and are cached apart."""
    known = recalled(nodes, device=device).workspace_bytes if nodes else {}
    missing = {key: node for key, node in nodes.items() if key not in known}
    if not missing:
        return known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one that cannot run by itself counts without a workspace
        found = profile(missing, device=device, budget_seconds=0, subject="workspaces")
    return {**known, **found.workspace_bytes}


def _begin(node: fx.Node, operands: OperandFactory, hurry: bool) -> Timing:
    """The first run of an op, on the CPU; on another device all of its runs."""
    if operands.device.type != "cpu":
        kernel_seconds, workspace_bytes, launch_seconds = _measure_on_device(node, operands, hurry)
        return Timing(
            lambda: kernel_seconds, [kernel_seconds], workspace_bytes, once=True, launch_seconds=launch_seconds
        )
    run = _call(node, operands)
    first: list[float] = []
    workspace_bytes = _cpu_workspace(lambda: _held(run, first))
    overwriting = _overwriting_call(node, operands)
    if overwriting is not None and inplace.needs_scratch_to_overwrite(node.target):
        workspace_bytes = max(workspace_bytes, _cpu_workspace(overwriting))
        overwriting = overwriting if inplace.usually_overwrites(node.target) else None
    return Timing(
        run=lambda: _cpu_clock(overwriting or run),
        times=[seconds for seconds in first if seconds > _FIRST_COUNTS_SECONDS and overwriting is None],
        workspace_bytes=workspace_bytes,
        moved_bytes=moved_bytes(node),
        once=hurry or first[0] > _SLOW_SECONDS,
    )


def _measure_on_device(node: fx.Node, operands: OperandFactory, hurry: bool) -> tuple[float, int, float]:
    clock = _device_clock(operands.device)
    try:
        return _timed_by(clock, node, operands, hurry)
    except torch.OutOfMemoryError as error:
        if not clock.give_back():
            raise
        error.__traceback__ = None  # its frames hold the operands
    return _timed_by(clock, node, operands, hurry)


def _timed_by(clock: DeviceClock, node: fx.Node, operands: OperandFactory, hurry: bool) -> tuple[float, int, float]:
    run = _call(node, operands)
    start = time.perf_counter()
    workspace_bytes = _cuda_workspace(run)
    slow = time.perf_counter() - start > _SLOW_SECONDS
    found = clock.time(run, once=hurry or slow)
    return found.kernel_seconds, workspace_bytes, found.launch_seconds


def _call(node: fx.Node, operands: OperandFactory) -> Callable[[], Any]:
    target: Any = node.target
    args, kwargs = operands.arguments(node)
    return lambda: target(*args, **kwargs)


def _overwriting_call(node: fx.Node, operands: OperandFactory) -> Callable[[], Any] | None:
    """The op as it writes over an operand; None where it cannot."""
    taken = inplace.operands(node)
    target: Any = node.target
    if not taken or not (inplace.usually_overwrites(target) or inplace.needs_scratch_to_overwrite(target)):
        return None
    args, kwargs = operands.arguments(node)
    target, kwargs = inplace.overwriting(target, kwargs, _tensor_of(taken[0], node.args, args))
    return lambda: target(*args, **kwargs)


def _tensor_of(operand: fx.Node, nodes: Sequence[Any], tensors: Sequence[Any]) -> Any:
    """The tensor that stands for an operand of a call, which may be in a list."""
    for node, tensor in zip(nodes, tensors, strict=True):
        if node is operand:
            return tensor
        if isinstance(node, (list, tuple)) and operand in node:
            return tensor[node.index(operand)]
    raise AssertionError(f"{operand} is no operand")


@lru_cache(1)
def _device_clock(device: torch.device) -> DeviceClock:
    return DeviceClock(device)


def _held(run: Callable[[], Any], seconds: list[float]) -> Any:
    """The result of a run, whose time is added to `seconds`."""
    result = []
    seconds.append(_cpu_clock(lambda: result.append(run())))
    return result.pop()


def _cpu_clock(run: Callable[[], Any]) -> float:
    """How long a run takes, without the time in which another process had the core.

    That is at least the caller's own processor time, and an equal share of that of all threads: the caller may compute
    with the others, or only wait for them.
    """
    start, in_thread, in_process = time.perf_counter(), time.thread_time(), time.process_time()
    result = run()
    del result  # freeing memory takes time, in a step too
    in_thread, in_process = time.thread_time() - in_thread, time.process_time() - in_process
    seconds = time.perf_counter() - start
    if seconds < _UNDISTURBED_SECONDS:
        return seconds
    return min(seconds, max(in_thread, in_process / torch.get_num_threads()))


def _cpu_workspace(run: Callable[[], Any]) -> int:
    result, changes = allocations.record(run)
    del result  # held until here: results are not workspace
    return allocations.peak_bytes(changes) - max(0, sum(changes))


def _cuda_workspace(run: Callable[[], Any]) -> int:
    run()  # selects kernels, and allocates the workspaces that cuBLAS keeps
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    result = run()
    torch.accelerator.synchronize()
    workspace_bytes = torch.accelerator.max_memory_allocated() - torch.accelerator.memory_allocated()
    del result
    return max(0, workspace_bytes)


@contextmanager
def _bar(nodes: Mapping[str, fx.Node], show: bool | None) -> Iterator[Callable[[str], None]]:
    if show is None and doing("profile"):
        sizes = [_elems(node) for node in nodes.values()]  # what a run takes goes about with them
        before = zip(count(1), accumulate(sizes, initial=0), strict=False)

        def say(target: str) -> None:
            number, done = next(before)
            doing("profile", f"op {number} of {len(nodes)}: {target}", done=done, total=sum(sizes))

        yield say
        return
    shown = bool(nodes) and (sys.stderr.isatty() if show is None else show)
    columns = (
        TextColumn("timing ops"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal, disable=not shown) as bar:
        task = bar.add_task("", total=len(nodes))
        started = iter((0,))  # the first call completes nothing

        def advance(target: str) -> None:
            bar.update(task, advance=next(started, 1), description=target)

        yield advance
        bar.update(task, completed=len(nodes), description="")


def _elems(node: fx.Node) -> int:
    values = tree_leaves([node.meta.get("val"), [operand.meta.get("val") for operand in node.all_input_nodes]])
    counts = [value.numel() for value in values if isinstance(value, torch.Tensor)]
    return 1 + sum(n for n in counts if isinstance(n, int))  # a symbol must stay one


def _readable(entries: Mapping[str, Any]) -> dict[str, _Cost]:
    """The valid entries; others are ignored and measured again."""
    good: dict[str, _Cost] = {}
    for key, value in entries.items():
        try:
            seconds, workspace_bytes, launch_seconds = value
            times = read_value(float, seconds, key), read_value(float, launch_seconds, key)
            cost = _Cost(times[0], read_value(int, workspace_bytes, key), times[1])
        except (InputError, TypeError, ValueError):  # not three numbers
            continue
        if all(0 <= seconds <= _LONGEST_SECONDS for seconds in times) and cost.workspace_bytes >= 0:
            good[key] = cost
    return good
