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

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from rich.table import Table
from torch.autograd.graph import save_on_cpu

from bench.frame import NETWORKS, Bench, Run, option, use_exact_kernels
from bench.interleave import median_ratio
from bench.ours import run_within
from bench.peers import checkpointed
from bench.plain import Plain, heading, plan_columns
from bench.tables import cells, new_table
from bench.workload import Forward, make_workload
from examples.planners import NAMES
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.options import Options
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


def contenders(plain: Plain, target: Hardware, most_bytes: int, *, quick: bool) -> Iterator[Measured]:
    """Everyone but `joint`, each checked and metered; of the ways to checkpoint only one where it has to be quick."""
    workload = plain.workload
    device = workload.device.type
    for setting, link in links(target, device).items():
        for planner in ("hascoet", "hmms", "layerwise") if not setting else ("hascoet",):
            yield planned(plain, planner, most_bytes, link, setting)
    if device == "cpu":
        folder = tempfile.gettempdir()
        yield planned(plain, "hascoet", most_bytes, None, "to a file, not rehearsed", offload_to=folder)
    for setting, forward in islice(checkpointed(workload.shared_copy()), 1 if quick else None):
        # Its gradients are plain PyTorch's, but it moves batch norm's statistics twice: metered, not held against them.
        plain.metered(forward)
        yield Measured("checkpointing", setting, forward, plain.metered(forward))
    yield from eager(plain)


def eager(plain: Plain) -> Iterator[Measured]:
    """Contenders without a plan. On the CPU they have no link to rehearse, so they run on CUDA alone."""
    if plain.workload.device.type != "cuda":
        return
    model = plain.workload.shared_copy()

    def in_context(context: Callable[[], Any]) -> Forward:
        def forward(images: torch.Tensor) -> torch.Tensor:
            with context():
                return model(images)

        return forward

    yield checked(plain, Measured("save_on_cpu", "", in_context(lambda: save_on_cpu(pin_memory=True)), 0))
    yield checked(plain, Measured("offload_activations", "", in_context(offload_activations), 0))


def planned(
    plain: Plain,
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
        Unsettled: every plan was over the budget when measured.
    """
    run = run_within(
        plain, budget_bytes, offload_to=offload_to, options=Options(planner=NAMES.get(planner, planner), rehearse=link)
    )
    return Measured(planner, setting, run.forward, run.measured_peak_bytes, run.plan, inside)


def checked(plain: Plain, run: Measured) -> Measured:
    """Held against plain PyTorch, then metered."""
    plain.reference.check(run.forward, run.name)
    return replace(run, peak_bytes=plain.metered(run.forward))


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
    plain = Plain(workload)
    kept = planned(plain, "keep_all", 2 * plain.peak_bytes, None)
    others = list(contenders(plain, target, 2 * plain.peak_bytes, quick=quick))
    scouted = {run.name: workload.seconds(run.forward) for run in others}
    by_hand = [run for run in others if run.contender == "checkpointing"]
    others = [run for run in others if run not in by_hand or run in front(by_hand, scouted)]
    # What takes more than plain PyTorch has no bytes for `joint` to fit in but plain's.
    budgets = {
        run.name: min(run.peak_bytes, plain.peak_bytes) for run in others if not run.setting.startswith("without")
    }
    budgets |= {f"{share:.0%} of plain": plain.budget_bytes(100 * share) for share in _SHARES[: 1 if quick else None]}
    ours, infeasible = [], {}
    for inside, budget_bytes in budgets.items():
        try:
            setting = f"in {format_bytes(budget_bytes)}, of {inside}"
            link = links(target, device)[""]
            ours.append(planned(plain, "joint", budget_bytes, link, setting, inside))
        except BudgetError as error:
            infeasible[inside] = str(error).splitlines()[0]
    times = plain.in_turns({run.name: run.forward for run in (kept, *others, *ours)}, repeats)

    def row(run: Measured) -> dict[str, Any]:
        found: dict[str, Any] = {
            "contender": run.contender,
            "setting": run.setting,
            "inside": run.inside,
            "peak_bytes": run.peak_bytes,
            "share_percent": plain.share_percent(run.peak_bytes),
            **times.columns(run.name),
        }
        if run.plan is not None:
            predicted = [seconds + run.plan.added_seconds for seconds in times.seconds[kept.name]]
            off_percent = 100 * (median_ratio(predicted, times.seconds[run.name]) - 1)
            found |= {**plan_columns(run.plan), "predicted_off_percent": off_percent}
        return found

    rows = [row(run) for run in (kept, *others, *ours)]
    return {
        "network": network,
        "setting": {"batch": batch, "image": image, "hardware": target.name if device == "cpu" else "this machine"},
        "plain": plain.columns(times),
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
    table = new_table(
        f"{heading(result)}; link of {result['setting']['hardware']}",
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
    settings = run.chosen(CUDA_SETTINGS if run.device.type == "cuda" else SETTINGS, QUICK_SETTINGS)
    target = presets.get(asked.hardware)
    use_exact_kernels()
    results: list[dict[str, Any]] = []
    how = {"repeats": asked.repeats, "device": run.device.type, "seed": asked.seed, "quick": asked.quick}
    for name, setting in settings.items():
        results.append(measure_network(name, *setting, target, **how))
        run.say(network_table(results[-1]))
        run.save(results=results)
    run.say(summary_line(results))


main = Bench(
    _run,
    NETWORKS,
    option("--hardware", default="titanx-pcie", help="whose link to rehearse"),
    option("--repeats", type=int, default=7, help="timed steps of each contender"),
    quick="one small network: does it run?",
    device=True,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
