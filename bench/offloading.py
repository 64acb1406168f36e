"""Memory against time with a slow link to the host: Shoal's planners, checkpointing by hand, and eager offloading.

    python -m bench.offloading                    about half an hour on two cores
    python -m bench.offloading --quick            one small network: does it run?
    python -m bench.offloading --device cuda      on a GPU, by its own link, with save_on_cpu beside us

On the CPU the link is a rehearsal of `--hardware` (default: the Titan X of the CPU-offloading paper): copies run in
threads and take as long beside this CPU's computation as there. What every planned or eager contender trains is held
against plain PyTorch before it is timed, peaks are those of the whole step, and all contenders are timed in turns.
`joint` is run inside the bytes of each other contender, so that every row of another has one of ours beside it. The
columns: measured peak; added time measured, predicted, and how far the predicted step is off; what the copies take by
themselves and what the device waits for them by the plan, in percent of the plain step; bytes on the host. Times are
medians of ratios within a turn. A prediction is about the plan and not about the engine, so the predicted step is
Shoal's own with everything kept, which has a row of its own, and the seconds that the plan adds.

The threads that copy need a core: run it with OMP_NUM_THREADS one below the number of cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from rich.table import Table
from torch.autograd.graph import save_on_cpu

from bench.frame import Bench, Run, comma_separated, option, some_of, use_exact_kernels
from bench.interleave import median_ratio
from bench.peers import checkpointed
from bench.reference import Reference, take_reference
from bench.tables import cells, new_table
from bench.workload import Forward, Workload, make_workload
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.api import compile as compile_model
from shoal.errors import BudgetError
from shoal.offload.eager import offload_activations

SETTINGS = {"vgg19": (4, 96), "resnet18": (12, 128), "resnet50": (8, 112), "mobilenet_v2": (12, 128)}
CUDA_SETTINGS = {"vgg19": (64, 224), "resnet50": (96, 224)}
QUICK_SETTINGS = {"resnet18": (8, 64)}
PAGEABLE = 0.5  # of the pinned bandwidth: what `shoal hardware` finds between a third and two thirds on PCIe
_SHARES = (0.75, 0.6, 0.5)  # budgets of `joint` beside those of the other contenders' peaks
_OURS = ("joint", "keep_all")
_OF_ANOTHER_LINK = ("without", "to a file")  # settings that `joint` is not held against
_NOISE_PERCENT = 2.0  # of the plain step: two contenders that near are equal
_WITHIN_PERCENT = 10.0  # predicted against measured seconds


@dataclass(frozen=True)
class Measured:
    """A contender that was checked.

    Attributes:
        contender, setting: its name.
        forward: the model to call.
        peak_bytes: measured, of the whole step.
        plan: None for contenders that have none.
        inside: for `joint`: the contender inside whose bytes it runs.
    """

    contender: str
    setting: str
    forward: Forward
    peak_bytes: int
    plan: Plan | None = None
    inside: str = ""

    @property
    def name(self) -> str:
        return f"{self.contender} {self.setting}".strip()


def links(target: Hardware, device: str) -> dict[str, Hardware | None]:
    """The link, and the paper's two ablations of it; on CUDA the link is the machine's own."""
    if device == "cuda":
        return {"": None}
    slow = replace(
        target.link,
        to_host_bytes_per_second=PAGEABLE * target.link.to_host_bytes_per_second,
        to_device_bytes_per_second=PAGEABLE * target.link.to_device_bytes_per_second,
    )
    return {
        "": target,
        "without pinned memory": replace(target, link=slow),
        "without overlap": replace(target, link=replace(target.link, overlaps=False)),
    }


def contenders(
    workload: Workload, reference: Reference, target: Hardware, most_bytes: int, *, quick: bool
) -> Iterator[Measured]:
    """Everyone but `joint`, each checked and metered; of the ways to checkpoint only one where it has to be quick."""
    device = workload.device.type
    for setting, link in links(target, device).items():
        for planner in ("hascoet", "hmms", "layerwise") if not setting else ("hascoet",):
            yield planned(workload, reference, planner, most_bytes, link, setting)
    if device == "cpu":
        folder = tempfile.gettempdir()
        yield planned(workload, reference, "hascoet", most_bytes, None, "to a file, not rehearsed", offload_to=folder)
    for setting, forward in islice(checkpointed(workload.shared_copy()), 1 if quick else None):
        # Its gradients are plain PyTorch's, but it moves batch norm's statistics twice: metered, not held against them.
        reference.start()
        workload.seconds(forward)
        reference.start()
        yield Measured("checkpointing", setting, forward, workload.peak_bytes(forward))
    yield from eager(workload, reference)


def eager(workload: Workload, reference: Reference) -> Iterator[Measured]:
    """Contenders without a plan. On the CPU they have no link to rehearse, so they run on CUDA alone."""
    if workload.device.type != "cuda":
        return
    model = workload.shared_copy()

    def in_context(context: Callable[[], Any]) -> Forward:
        def forward(images: torch.Tensor) -> torch.Tensor:
            with context():
                return model(images)

        return forward

    yield checked(workload, reference, Measured("save_on_cpu", "", in_context(lambda: save_on_cpu(pin_memory=True)), 0))
    yield checked(workload, reference, Measured("offload_activations", "", in_context(offload_activations), 0))


def planned(
    workload: Workload,
    reference: Reference,
    planner: str,
    budget_bytes: int,
    link: Hardware | None,
    setting: str = "",
    inside: str = "",
    offload_to: str = "auto",
) -> Measured:
    """The step under a planner.

    Raises:
        BudgetError: no plan fits.
        WrongResult: it trains otherwise than plain PyTorch.
    """
    model = compile_model(
        workload.shared_copy(), budget_bytes, planner=planner, rehearse=link, offload_to=offload_to, name=workload.name
    )
    reference.check(model, f"{planner} {setting}")
    run = checked(workload, reference, Measured(planner, setting, model, 0, inside=inside))
    return replace(run, plan=model.shoal.plan)  # type: ignore[union-attr]


def checked(workload: Workload, reference: Reference, run: Measured) -> Measured:
    """Held against plain PyTorch, then metered."""
    reference.check(run.forward, run.name)
    reference.start()
    return replace(run, peak_bytes=workload.peak_bytes(run.forward))


def front(runs: Sequence[Measured], seconds: dict[str, float]) -> list[Measured]:
    """The runs that no other of them beats in both bytes and seconds."""
    return [
        run
        for run in runs
        if not any(
            other.peak_bytes <= run.peak_bytes and seconds[other.name] < seconds[run.name]
            for other in runs
            if other is not run
        )
    ]


def measure_network(
    network: str, batch: int, image: int, target: Hardware, *, repeats: int, device: str, seed: int, quick: bool
) -> dict[str, Any]:
    """Every contender's peak and time on one network.

    Raises:
        WrongResult: a contender differs from plain PyTorch.
    """
    workload = make_workload(network, batch, image, seed=seed, device=device)
    plain = workload.shared_copy()
    reference = take_reference(workload, plain)
    plain_peak_bytes = workload.peak_bytes(plain)
    kept = planned(workload, reference, "keep_all", 2 * plain_peak_bytes, None)
    others = list(contenders(workload, reference, target, 2 * plain_peak_bytes, quick=quick))
    scouted = {run.name: workload.seconds(run.forward) for run in others}
    by_hand = [run for run in others if run.contender == "checkpointing"]
    others = [run for run in others if run not in by_hand or run in front(by_hand, scouted)]
    # What takes more than plain PyTorch has no bytes for `joint` to fit in but plain's.
    budgets = {
        run.name: min(run.peak_bytes, plain_peak_bytes) for run in others if not run.setting.startswith("without")
    }
    budgets |= {f"{share:.0%} of plain": int(share * plain_peak_bytes) for share in _SHARES[: 1 if quick else None]}
    ours, infeasible = [], {}
    for inside, budget_bytes in budgets.items():
        try:
            setting = f"in {format_bytes(budget_bytes)}, of {inside}"
            link = links(target, device)[""]
            ours.append(planned(workload, reference, "joint", budget_bytes, link, setting, inside))
        except BudgetError as error:
            infeasible[inside] = str(error).splitlines()[0]
    forwards = {"plain": plain, **{run.name: run.forward for run in (kept, *others, *ours)}}
    taken = workload.in_turns(forwards, repeats, warm_ups=1)

    def row(run: Measured) -> dict[str, Any]:
        found: dict[str, Any] = {
            "contender": run.contender,
            "setting": run.setting,
            "inside": run.inside,
            "peak_bytes": run.peak_bytes,
            "share_percent": 100 * run.peak_bytes / plain_peak_bytes,
            "seconds": taken[run.name],
            "added_percent": 100 * (median_ratio(taken[run.name], taken["plain"]) - 1),
        }
        if run.plan is not None:
            added_seconds = run.plan.predicted_seconds - run.plan.plain_seconds
            predicted = [seconds + added_seconds for seconds in taken[kept.name]]
            found["predicted_peak_bytes"] = run.plan.predicted_peak_bytes
            found["predicted_added_percent"] = 100 * added_seconds / run.plan.plain_seconds
            found["predicted_off_percent"] = 100 * (median_ratio(predicted, taken[run.name]) - 1)
            found["stall_percent"] = 100 * run.plan.timeline.stall_seconds / run.plan.plain_seconds
            copies = sum(transfer.seconds for transfer in run.plan.timeline.transfers)
            found["copies_percent"] = 100 * copies / run.plan.plain_seconds
            found["host_bytes"] = run.plan.host_bytes
            found["recomputed_storages"] = len(run.plan.recomputed)
        return found

    rows = [row(run) for run in (kept, *others, *ours)]
    return {
        "network": network,
        "setting": {"batch": batch, "image": image, "hardware": target.name if device == "cpu" else "this machine"},
        "plain": {"peak_bytes": plain_peak_bytes, "seconds": taken["plain"]},
        "rows": rows,
        "infeasible": infeasible,
        "verdicts": verdicts(rows),
    }


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """For each other contender, `joint` inside its bytes: "faster", "equal" or "slower"; "none" where no plan fits.

    >>> rows = [{"contender": "hmms", "setting": "", "inside": "", "added_percent": 9.0}]
    >>> verdicts([*rows, {"contender": "joint", "setting": "", "inside": "hmms", "added_percent": 3.0}])
    {'hmms': 'faster'}
    """
    ours = {row["inside"]: row for row in rows if row["contender"] == "joint"}
    found = {}
    for row in rows:
        name = f"{row['contender']} {row['setting']}".strip()
        if row["contender"] in _OURS or row["setting"].startswith(_OF_ANOTHER_LINK):
            continue
        if name not in ours:
            found[name] = "none"
            continue
        gap = ours[name]["added_percent"] - row["added_percent"]
        found[name] = "slower" if gap > _NOISE_PERCENT else "equal" if gap > -_NOISE_PERCENT else "faster"
    return found


def network_table(result: dict[str, Any]) -> Table:
    """One row a contender, by bytes."""
    plain, setting = result["plain"], result["setting"]
    table = new_table(
        f"{result['network']}, {setting['batch']} x {setting['image']} pixels, link of {setting['hardware']}: "
        f"plain {format_bytes(plain['peak_bytes'])}, {statistics.median(plain['seconds']):.2f} s a step",
        "<contender | <setting | peak | of plain | added | predicted | off | copies | stalls | host",
    )
    for row in sorted(result["rows"], key=lambda row: -row["peak_bytes"]):
        form = "{contender} | {setting} | {peak_bytes:bytes} | {share_percent:.1f} % | {added_percent:+.1f} % | "
        form += "{predicted_added_percent:+.1f} % | {predicted_off_percent:+.1f} % | {copies_percent:.0f} % | "
        table.add_row(*cells(form + "{stall_percent:.1f} % | {host_bytes:bytes}", row))
    return table


def summary_line(results: Sequence[dict[str, Any]]) -> str:
    """How often `joint` was beaten, and how near the predicted times were."""
    found = [verdict for result in results for verdict in result["verdicts"].values()]
    counts = ", ".join(f"{found.count(word)} {word}" for word in ("faster", "equal", "slower", "none"))
    off = [
        abs(row["predicted_off_percent"])
        for result in results
        for row in result["rows"]
        if row["contender"] != "keep_all" and "host_bytes" in row
    ]
    near = sum(one <= _WITHIN_PERCENT for one in off)
    return (
        f"joint inside the bytes of {len(found)} other runs: {counts}; predicted step time within "
        f"{_WITHIN_PERCENT:g} % of the measured one in {near} of {len(off)} planned runs, "
        f"{max(off, default=0.0):.1f} % off at most"
    )


def _run(run: Run) -> None:
    asked = run.asked
    settings = run.pick(CUDA_SETTINGS if run.device.type == "cuda" else SETTINGS, QUICK_SETTINGS)
    target = presets.get(asked.hardware)
    use_exact_kernels()
    results: list[dict[str, Any]] = []
    how = {"repeats": asked.repeats, "device": run.device.type, "seed": asked.seed, "quick": asked.quick}
    for name in some_of("--networks", asked.networks or list(settings), settings):
        results.append(measure_network(name, *settings[name], target, **how))
        run.say(network_table(results[-1]))
        run.save(results=results)
    run.say(summary_line(results))


main = Bench(
    _run,
    option("--networks", type=comma_separated, help="of " + ", ".join(SETTINGS)),
    option("--hardware", default="titanx-pcie", help="whose link to rehearse"),
    option("--repeats", type=int, default=7, help="timed steps of each contender"),
    quick="one small network: does it run?",
    device=True,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
