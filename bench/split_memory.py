"""Figure 10 of the Split-CNN paper: the largest batch in a P100, split into four patches, and what it costs.

    python -m bench.split_memory             about an hour on two cores; --parts takes one of the two
    python -m bench.split_memory --quick     small images, and no steps that run: does it run?
    python -m bench.split_memory --exact     overlapping patches too, whose plans take minutes each

Two parts. *Simulated*: VGG-19 and ResNet-18 at 224 pixels on the paper's machine (the calibrated roofline of
`bench.hmms`), depth 75 %, 2 x 2 patches. Plain is the step with the storages that PyTorch has; the others are Shoal's.
The paper's ResNet-18 recomputes its batch norms, as `hmms_recompute` does. *Rehearsed*: the same on this CPU at a
reduced size under a memory limit: the largest batch of which plain PyTorch and Shoal's plans each run whole steps
inside as many bytes, the plans with 5 % of added time or less and up to eight times the plain batch, and images a
second. `exact` is `halo="exact"`, the unsplit network's function. The threads that copy need a core: run it with
OMP_NUM_THREADS one below the number of cores.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import nn

import shoal
from bench.frame import Bench, Run, option, switch
from bench.hmms import captured, paper_machine, planned
from bench.interleave import in_turns
from bench.tables import new_table
from bench.workload import Forward, Workload, make_workload
from examples import networks as models
from examples.planners import NAMES
from shoal.core.plan import Plan
from shoal.core.schedule import schedule
from shoal.core.sizes import format_bytes
from shoal.core.validate import check_runs
from shoal.engine.search.max_batch import largest_fitting
from shoal.errors import BudgetError
from shoal.memory.limit import memory_limit

PAPER = {"vgg19": (6.0, 1.5), "resnet18": (2.0, 4.9)}  # times the plain batch, loss of throughput in percent
PARTS = ("simulated", "rehearsed")
DEPTH, GRID = 0.75, (2, 2)
CONTENDERS = (  # name, how it is split (None for not), planner
    ("hmms", None, NAMES["hmms"]),
    ("hmms, batch norms recomputed", None, NAMES["hmms_recompute"]),
    ("joint", None, "joint"),
    ("split, kept", {}, "keep_all"),
    ("split, hmms", {}, NAMES["hmms"]),
    ("split, hmms, batch norms recomputed", {}, NAMES["hmms_recompute"]),
    ("split, joint", {}, "joint"),
)
EXACT = ("exact, joint", {"halo": "exact"}, "joint")
REHEARSED = {"vgg19_cifar": (32, 64), "resnet18_cifar": (32, 64)}  # pixels, plain batch that sets the limit
REHEARSED_WAYS: tuple[tuple[str, dict[str, Any] | None, str | None], ...] = (
    ("plain PyTorch", None, None),
    ("split, hmms", {}, NAMES["hmms"]),
    ("split, hmms, batch norms recomputed", {}, NAMES["hmms_recompute"]),
    ("joint", None, "joint"),
    ("split, joint", {}, "joint"),
)
_SCALARS_BYTES = 512  # for counters that one step frees earlier than another
_STEPS_UNDER_THE_LIMIT = 2  # the first may be a trial that is planned anew
_MAX_TIMES = 8  # of the plain batch: beyond it none is tried
_MAX_ADDED = 0.05  # of the plain step, by the plan: waiting for the link, far more images would fit
_REPEATS = 3


def network_of(name: str, how: dict[str, Any] | None) -> nn.Module:
    model = models.build(name, seed=0)
    return model if how is None else shoal.split(model, DEPTH, GRID, **how)


def simulated(name: str, image: int, memory_bytes: int, *, exact: bool = False) -> list[dict[str, Any]]:
    """The largest batch of every contender on the paper's machine."""
    machine = paper_machine()

    shape = models.example_shape(name, 1, image)[1:]

    def images(batch: int) -> torch.Tensor:
        return torch.empty(batch, *shape, device="meta")

    def plain(batch: int) -> Plan:
        return planned(captured(name, batch, image), "keep_all", memory_bytes)

    plain_batch, _ = largest_fitting(lambda batch: plain(batch).predicted_peak_bytes, 0, memory_bytes, first=16)
    found = [_row("plain PyTorch", plain(plain_batch), plain_batch, memory_bytes)]
    for contender, how, planner in (*CONTENDERS, *([EXACT] if exact else [])):
        with torch.device("meta"):
            model = network_of(name, how)
        largest = shoal.fit(
            model,
            images,
            memory_bytes,
            hardware=machine,
            allow="bitwise",
            first=plain_batch,
            options=shoal.Options(planner=planner),
        )
        found.append(_row(contender, largest.plan, largest.batch, memory_bytes))
    return with_ratios(found)


def _row(contender: str, plan: Plan, batch: int, memory_bytes: int) -> dict[str, Any]:
    graph, residences = plan.graph, plan.residences
    return {
        "contender": contender,
        "batch": batch,
        "images_per_second": batch / plan.predicted_seconds,
        "peak_bytes": check_runs(graph, residences, schedule(graph, residences), memory_bytes),
        "recomputed": len(plan.recomputed),
        "offloaded": len(plan.offloaded),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its batch and its loss of throughput beside the first one's.

    >>> rows = [{"batch": 2, "images_per_second": 8.0}, {"batch": 6, "images_per_second": 6.0}]
    >>> [(row["times"], row["loss_percent"]) for row in with_ratios(rows)]
    [(1.0, 0.0), (3.0, 25.0)]
    """
    plain = rows[0]
    for row in rows:
        row["times"] = row["batch"] / plain["batch"] if plain["batch"] else 0.0
        rate = row["images_per_second"] / plain["images_per_second"] if plain["images_per_second"] else 0.0
        row["loss_percent"] = 100 * (1 - rate)
    return rows


def rehearsed(
    name: str,
    image: int,
    plain_batch: int,
    *,
    ways: Collection[str] | None = None,
    first: int | None = None,
    exact: bool = False,
) -> dict[str, Any]:
    """The largest batches that run whole steps under the limit that plain PyTorch just passes with `plain_batch`.

    `ways` names the contenders of `REHEARSED_WAYS` beside plain PyTorch; none: all. The search begins with `first`
    images, without it with as many as the best way before. Saved tensors may leave over the
    paper's link, as much slower as this CPU computes slower. Steps are timed afterwards, without the limit, all
    contenders taking turns.
    """
    plain = make_workload(name, plain_batch, image)
    gc.collect()  # what is freed while the peak is measured would lower it
    limit_bytes = plain.peak_bytes(plain.shared_copy()) + _SCALARS_BYTES
    target = paper_machine()
    rows, ran = [], {}
    for contender, how, planner in (*REHEARSED_WAYS, *([EXACT] if exact else [])):
        if planner is not None and ways and contender not in ways:
            continue

        def at(batch: int, how: dict[str, Any] | None = how, planner: str | None = planner) -> tuple[Workload, Forward]:
            model = network_of(name, how).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            workload = make_workload(name, batch, image, model=model)
            if planner is None:
                return workload, model
            how = shoal.Options(planner=planner, rehearse=target)
            return workload, shoal.compile(model, limit_bytes, allow="bitwise", options=how)

        largest = max((row["batch"] for row in rows), default=0)
        apart, most = max(1, plain_batch // 4), _MAX_TIMES * plain_batch
        begin = plain_batch if planner is None else min(first or largest or plain_batch, most)
        batch = largest_that_runs(at, limit_bytes, begin, apart, most)
        rows.append({"contender": contender, "batch": batch, "images_per_second": 0.0})
        if batch:
            ran[contender] = at(batch)
    seconds = in_turns({name: partial(step.seconds, forward) for name, (step, forward) in ran.items()}, _REPEATS)
    for row in rows:
        if row["batch"]:
            row["images_per_second"] = row["batch"] / statistics.median(seconds[row["contender"]])
    return {"network": name, "image": image, "limit_bytes": limit_bytes, "rows": with_ratios(rows), "seconds": seconds}


def largest_that_runs(
    at: Callable[[int], tuple[Workload, Forward]], limit_bytes: int, first: int, apart: int, most: int
) -> int:
    """The largest batch that runs under a memory limit, by a plan that adds no more than 5 %; 0 for none.

    Args:
        at: batch → the step, and what runs its forward pass.
        limit_bytes: of memory, with what was there before it was set.
        first, apart, most: as for `largest_of`.
    """

    def runs(batch: int) -> bool:
        workload, forward = at(batch)
        inside = limit_bytes - workload.resident_bytes  # which was allocated before the limit
        gc.collect()  # what was metered of earlier batches would count
        try:
            with memory_limit(None) as limit:  # what others still hold is in use too, and is none of the step's
                limit.limit_bytes = limit.live_bytes + max(inside, 1)
                for _ in range(_STEPS_UNDER_THE_LIMIT):
                    workload.seconds(forward)
        except (BudgetError, torch.OutOfMemoryError):
            return False
        finally:
            workload.reset()  # gradients made under this limit would count under the next one
        plan = getattr(getattr(forward, "shoal", None), "plan", None)
        return plan is None or plan.added_seconds <= _MAX_ADDED * plan.plain_seconds

    return largest_of(runs, first, apart, most)


def largest_of(runs: Callable[[int], bool], first: int, apart: int, most: int) -> int:
    """The largest batch that runs, where all smaller ones do; 0 for none. Each batch is tried once.

    Args:
        runs: batch → whether it does.
        first: the batch to begin with. While they run, half as many are added, then as many, twice as many; then what
            is between the largest that ran and the smallest that did not is halved.
        apart: as many images more do not run, or are more than `most`; at least 1.
        most: images; more are not tried.

    >>> tried = []
    >>> largest_of(lambda batch: tried.append(batch) or batch <= 50, first=16, apart=4, most=64)
    49
    >>> tried
    [16, 24, 40, 64, 52, 46, 49]
    """
    fits, added, fails = 0, first, most + 1
    while fits < most and fails > most:
        batch = min(fits + added, most)
        if runs(batch):
            fits, added = batch, added * 2 if fits else max(1, first // 2)
        else:
            fails = batch
    while fails - fits > apart:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if runs(middle) else (fits, middle)
    return fits


def table(title: str, rows: Sequence[dict[str, Any]], paper: tuple[float, float] | None) -> Table:
    shown = new_table(title, "<contender | batch | times | images/s | loss")
    for row in rows:
        if not row["batch"]:
            shown.add_row(row["contender"], "none fits")
            continue
        cells = [str(row["batch"]), f"{row['times']:.2f}", f"{row['images_per_second']:.1f}"]
        shown.add_row(row["contender"], *cells, f"{row['loss_percent']:.1f} %")
    if paper is not None:
        shown.add_row("Split-CNN + HMMS: paper, measured", "", f"{paper[0]:.0f}", "", f"{paper[1]:.1f} %")
    return shown


def _run(run: Run) -> None:
    asked = run.asked
    image, memory_bytes = run.pick((224, paper_machine().device.memory_bytes), (64, 2**30))
    run.result |= {"simulated": {}, "rehearsed": []}
    for name in run.pick(tuple(PAPER), ("resnet18",)) if "simulated" in asked.parts else ():
        rows = run.result["simulated"][name] = simulated(name, image, memory_bytes, exact=asked.exact)
        share = f"{DEPTH:.0%} of the convolutions, 2 x 2"
        title = f"{name}, {image} pixels, simulated in {format_bytes(memory_bytes)}: {share}"
        run.say(table(title, rows, run.pick(PAPER[name], None)))
    for name in asked.rehearse if "rehearsed" in asked.parts and not asked.quick else ():
        pixels, batch = REHEARSED[name]
        ran = rehearsed(name, pixels, batch, ways=asked.ways, first=asked.first, exact=asked.exact)
        run.result["rehearsed"].append(ran)
        title = f"{name}, {pixels} pixels, run on this CPU under a memory limit of {format_bytes(ran['limit_bytes'])}"
        run.say(table(title, ran["rows"], None))
    run.save()


main = Bench(
    _run,
    switch("--exact", "overlapping patches too: minutes for each plan"),
    option("--parts", known=PARTS, default=list(PARTS)),
    option("--rehearse", known=REHEARSED, default=list(REHEARSED), help="networks of the rehearsal"),
    option(
        "--ways",
        known=[way for way, _, _ in (*REHEARSED_WAYS, EXACT)],
        type=lambda text: [way.strip() for way in text.split(";") if way.strip()],
        help="of the rehearsal, beside plain PyTorch, with semicolons between; default: all",
    ),
    option("--first", type=int, help="images the rehearsal's search begins with"),
    quick="small images, and no steps that run: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
