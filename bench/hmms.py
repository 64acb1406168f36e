"""HMMS on the paper's machine, simulated: figures 1, 8, 10 and 11 of the Split-CNN paper, its figures beside ours.

    python -m bench.hmms             minutes on two cores
    python -m bench.hmms --quick     small images: does it run?

Nothing runs on a P100 here. The columns are: what the paper measured, and what Shoal simulates. Times are a roofline of
the P100's data sheet (`shoal.core.presets`) with one number calibrated: convolutions do CALIBRATION times the FLOP/s
that counting their direct form gives, since cuDNN 7 runs 3x3 convolutions as Winograd transforms. It is set so that
ResNet-18 can offload 55 % as in figure 1; the other figures follow. Figures 1 and 8 are of steps as PyTorch has them,
without Shoal's lossless rewrites, which save fewer bytes than the paper's framework did; figures 10 and 11 of Shoal's.
Every plan is held against `shoal.core.validate` before its row is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table

import shoal
from bench.frame import Bench, Run, WrongResult
from bench.layout_step_blocks import three_pools
from bench.tables import cells, new_table
from examples import networks as models
from examples.planners import NAMES
from examples.planners.hmms import offloadable, theoretical_limit
from shoal import planners
from shoal.capture.capture_step import capture_step
from shoal.core import presets
from shoal.core.hardware import Hardware, Link
from shoal.core.plan import Plan
from shoal.core.schedule import schedule
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.cost.roofline import roofline
from shoal.errors import BudgetError
from shoal.rewrites.table import TABLE

CALIBRATION = 1.98
BATCH, IMAGE = 64, 224
QUICK_BATCH, QUICK_IMAGE = 8, 64
OFFLOADABLE_PERCENT = {"vgg19": 100.0, "resnet18": 55.0, "resnet50": 40.0}  # figure 1, section 6.2
LOSS_PERCENT = {  # of throughput, figure 8: layer-wise, HMMS
    "vgg19": {"layerwise": 13.0, "hmms": 1.3},
    "resnet50": {"layerwise": 12.9, "hmms": 5.1},
}
LARGER_BATCH = {"vgg19": (6.0, 1.5), "resnet18": (2.0, 4.9)}  # figure 10, with Split-CNN: times, loss in percent
SPEEDUP_AT_10_GBPS = 2.1  # figure 11
EFFICIENCY = 0.8  # the paper's alpha
BANDWIDTHS_GBPS = (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 16.0, 32.0)
_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the way from the least bytes of `joint` to those of keeping everything
_SLACK = 1e-9


def paper_machine() -> Hardware:
    """The paper's P100, calibrated."""
    p100 = presets.get("p100-nvlink")
    device = replace(p100.device, flops_per_second=CALIBRATION * p100.device.flops_per_second)
    return replace(p100, name="p100-nvlink, calibrated", device=device)


def captured(network: str, batch: int, image: int, *, rewrites: bool = False) -> StepGraph:
    """The step of a full-size network on the paper's machine; nothing is allocated."""
    with torch.device("meta"):
        model = models.build(network)
    shape = models.example_shape(network, batch, image)
    example = torch.empty(shape, device="meta")
    step, _ = capture_step(model, example, name=network, runs_here=False, rewrites=TABLE if rewrites else ())
    return roofline(step.graph, paper_machine())


def planned(graph: StepGraph, planner: str, budget_bytes: int = 0) -> Plan:
    """A plan that passed the independent check."""
    plan = planners.get(NAMES.get(planner, planner))(graph, paper_machine(), budget_bytes)
    if plan.exact_step != graph:
        raise WrongResult(f"{planner} on {graph.model}: the plan is of another step")
    # The plan's own graph: `joint` may run the ops in another order.
    peak_bytes = check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences), budget_bytes)
    if peak_bytes != plan.predicted_peak_bytes:
        raise WrongResult(f"{planner} on {graph.model}: the check finds another peak: {peak_bytes} bytes")
    return plan


def loss_percent(plan: Plan) -> float:
    """Of throughput, against keeping everything."""
    return 100 * (1 - plan.plain_seconds / plan.predicted_seconds)


def cumulative_bytes(graph: StepGraph, link: Link) -> Sequence[tuple[str, int, float]]:
    """Figure 1's two curves: after each forward op, (its name, bytes generated, bytes the link can have carried)."""
    generated_bytes, carried_bytes = 0, 0.0
    leaving = set(offloadable(graph))
    rows = []
    for op in graph.ops[: graph.n_forward]:
        generated_bytes += sum(graph.storages[s].nbytes for s in op.writes if s in leaving)
        carried_bytes += op.seconds * link.to_host_bytes_per_second
        rows.append((op.name, generated_bytes, carried_bytes))
    return rows


def figure_1(graphs: dict[str, tuple[StepGraph, StepGraph]]) -> list[dict[str, Any]]:
    """What can be offloaded during the forward pass without slowing it."""
    rows = []
    for network, (graph, ours) in graphs.items():
        assert graph.link is not None and ours.link is not None
        rows.append(
            {
                "network": network,
                "paper_percent": OFFLOADABLE_PERCENT[network],
                "simulated_percent": 100 * theoretical_limit(graph, graph.link),
                "shoal_percent": 100 * theoretical_limit(ours, ours.link),
                "curves": [list(point) for point in cumulative_bytes(graph, graph.link)],
            }
        )
    return rows


def figure_8(graphs: dict[str, tuple[StepGraph, StepGraph]]) -> list[dict[str, Any]]:
    """Throughput lost by scheduling, at one batch, the same storages on the host; and `joint` inside HMMS's bytes."""
    rows = []
    for network in LOSS_PERCENT:
        if network not in graphs:
            continue
        graph = graphs[network][0]
        plans = {name: planned(graph, name) for name in ("layerwise", "hmms")}
        budget_bytes = plans["hmms"].predicted_peak_bytes
        plans["joint"] = planned(graph, "joint", budget_bytes)
        pools = three_pools(plans["hmms"].graph, plans["hmms"].residences)
        rows.append(
            {
                "network": network,
                "batch": BATCH,
                "paper_percent": LOSS_PERCENT[network],
                "simulated_percent": {name: loss_percent(plan) for name, plan in plans.items()},
                "peak_bytes": {name: plan.predicted_peak_bytes for name, plan in plans.items()},
                "host_bytes": {name: plan.host_bytes for name, plan in plans.items()},
                "pools": {
                    name: {"arena_bytes": pool.arena_bytes, "fragmentation": pool.fragmentation}
                    for name, pool in vars(pools).items()
                },
            }
        )
    return rows


def sweep(graphs: dict[str, tuple[StepGraph, StepGraph]]) -> list[dict[str, Any]]:
    """`joint` and HMMS inside the same budgets.

    Raises:
        WrongResult: `joint` lost more.
    """
    rows = []
    for network, (graph, _) in graphs.items():
        paper, plain = planned(graph, "hmms"), planned(graph, "keep_all")
        least_bytes = least_budget(graph)
        for place in _BUDGETS:
            budget_bytes = int(least_bytes + place * (plain.predicted_peak_bytes - least_bytes))
            plan = planned(graph, "joint", budget_bytes)
            fits = paper.predicted_peak_bytes <= budget_bytes
            if fits and plan.predicted_seconds > paper.predicted_seconds * (1 + _SLACK):
                raise WrongResult(f"{network} at {format_bytes(budget_bytes)}: joint is slower than hmms")
            rows.append(
                {
                    "network": network,
                    "budget_bytes": budget_bytes,
                    "budget_percent": 100 * budget_bytes / plain.predicted_peak_bytes,
                    "hmms_percent": loss_percent(paper) if fits else None,
                    "joint_percent": loss_percent(plan),
                    "bound_percent": 100 * plan.lower_bound_seconds / plan.plain_seconds,
                    "offloaded_bytes": plan.host_bytes,
                    "recomputed_bytes": sum(s.nbytes for s in plan.recomputed),
                    "planning_seconds": plan.planning_seconds,
                }
            )
    return rows


def least_budget(graph: StepGraph) -> int:
    """The least budget for which `joint` finds a plan."""
    try:
        planners.get("joint")(graph, paper_machine(), graph.resident_bytes + 1)
    except BudgetError as error:
        return error.least_feasible_bytes
    return graph.resident_bytes + 1


def figure_10(networks: Iterable[str], image: int, memory_bytes: int) -> list[dict[str, Any]]:
    """The largest batch in the P100's memory, and what it costs; the paper's own needs Split-CNN."""
    rows = []
    for network in networks:
        with torch.device("meta"):
            model = models.build(network)
        shape = models.example_shape(network, 1, image)[1:]
        found = {}
        for planner in ("keep_all", "hmms", "joint"):
            largest = shoal.fit(
                model,
                lambda batch, shape=shape: torch.empty(batch, *shape, device="meta"),
                memory_bytes,
                hardware=paper_machine(),
                allow="bitwise",
                name=network,
                options=shoal.Options(planner=NAMES.get(planner, planner)),
            )
            found[planner] = {
                "batch": largest.batch,
                "images_per_second": largest.images_per_second,
                "peak_bytes": largest.plan.predicted_peak_bytes,
            }
        plain = found["keep_all"]
        for figures in found.values():
            figures["times"] = figures["batch"] / plain["batch"]
            figures["loss_percent"] = 100 * (1 - figures["images_per_second"] / plain["images_per_second"])
        times, loss = LARGER_BATCH[network]
        rows.append({"network": network, "image": image, "paper_times": times, "paper_loss_percent": loss, **found})
    return rows


@dataclass(frozen=True)
class StepTimes:
    """One training step on one device of many, measured or simulated.

    Attributes:
        batch: samples of a step.
        forward_seconds: until the loss is there.
        backward_seconds: the rest of the step, recomputation and waiting included.
        gradient_bytes: of all parameter gradients.
    """

    batch: int
    forward_seconds: float
    backward_seconds: float
    gradient_bytes: int


def step_of(plan: Plan, batch: int) -> StepTimes:
    """The simulated step of `plan`: what runs or waits before the loss is there is forward, all else backward."""
    timeline = plan.timeline
    forward = [moment for moment in timeline.moments if moment.phase in ("forward", "loss")]
    forward_seconds = forward[-1].start_seconds + forward[-1].seconds
    gradient_bytes = sum(storage.nbytes for storage in plan.graph.storages if storage.kind == "gradient")
    return StepTimes(batch, forward_seconds, timeline.seconds - forward_seconds, gradient_bytes)


def epoch_seconds(step: StepTimes, samples: int, bandwidth_gbps: float, *, efficiency: float = EFFICIENCY) -> float:
    """Section 6.4 of the paper: T_epoch = |D| / N (T_forward + max(T_backward, 2 |G| / (alpha B))).

    An all-reduce moves at least 2 |G| bytes over each link (Patarasuk, Yuan, 2009) while the backward pass runs. Not in
    it: latency, the last layers' gradients, and everything else that uses the network.

    Args:
        step: of one device.
        samples: |D|, that one device sees in an epoch.
        bandwidth_gbps: B, between any two devices, in Gbit/s.
        efficiency: alpha, how much of B the all-reduce reaches.

    Example: half a gigabyte of gradients at 10 Gbit/s and an efficiency of 0.8 takes a second to sum, twice as long as
    the backward pass.

        >>> step = StepTimes(batch=50, forward_seconds=0.25, backward_seconds=0.5, gradient_bytes=500_000_000)
        >>> epoch_seconds(step, 1000, 10)
        25.0
    """
    network_seconds = 2 * step.gradient_bytes / (efficiency * bandwidth_gbps * 1e9 / 8)
    return samples / step.batch * (step.forward_seconds + max(step.backward_seconds, network_seconds))


def speedup(larger: StepTimes, baseline: StepTimes, bandwidth_gbps: float) -> float:
    """How many times faster an epoch is with the steps of `larger`: a larger batch sends its gradients less often."""
    return epoch_seconds(baseline, 1, bandwidth_gbps) / epoch_seconds(larger, 1, bandwidth_gbps)


def figure_11(graph: StepGraph, larger: StepGraph, batches: tuple[int, int], budget_bytes: int) -> list[dict[str, Any]]:
    """The projected speedup of distributed training with the larger batch, over the bandwidth."""
    baseline = step_of(planned(graph, "keep_all"), batches[0])
    with_offload = step_of(planned(larger, "joint", budget_bytes), batches[1])
    return [{"bandwidth_gbps": gbps, "speedup": speedup(with_offload, baseline, gbps)} for gbps in BANDWIDTHS_GBPS]


def measure(batch: int, image: int, memory_bytes: int) -> dict[str, Any]:
    """All four figures."""
    graphs = {n: (captured(n, batch, image), captured(n, batch, image, rewrites=True)) for n in OFFLOADABLE_PERCENT}
    largest = figure_10(LARGER_BATCH, image, memory_bytes)
    vgg = next(row for row in largest if row["network"] == "vgg19")
    batches = (vgg["keep_all"]["batch"], vgg["joint"]["batch"])
    vgg_steps = [captured("vgg19", one, image, rewrites=True) for one in batches]
    return {
        "calibration": CALIBRATION,
        "setting": {"batch": batch, "image": image, "memory_bytes": memory_bytes},
        "figure_1": figure_1(graphs),
        "figure_8": figure_8(graphs),
        "sweep": sweep(graphs),
        "figure_10": largest,
        "figure_11": {
            "batches": batches,
            "curve": figure_11(*vgg_steps, batches, memory_bytes),
        },
    }


def offloadable_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        "Figure 1: share of the generated bytes that can be offloaded during the forward pass",
        "<network | paper, measured | simulated, PyTorch's storages | simulated, Shoal's storages",
    )
    for row in rows:
        percents = (row["paper_percent"], row["simulated_percent"], row["shoal_percent"])
        table.add_row(row["network"], *(f"{percent:.0f} %" for percent in percents))
    return table


def loss_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        f"Figure 8: throughput lost at batch {rows[0]['batch'] if rows else BATCH}",
        "<network | <plan | paper, measured | simulated | peak | on the host",
    )
    for row in rows:
        for plan, percent in row["simulated_percent"].items():
            paper = row["paper_percent"].get(plan)
            cells = [row["network"], plan, "-" if paper is None else f"{paper:.1f} %", f"{percent:.1f} %"]
            table.add_row(*cells, format_bytes(row["peak_bytes"][plan]), format_bytes(row["host_bytes"][plan]))
    return table


def sweep_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        "joint against HMMS inside the same budget (simulated loss of throughput)",
        "<network | budget | HMMS | joint | bound | offloaded | recomputed | planned in",
    )
    for row in rows:
        hmms = "does not fit" if row["hmms_percent"] is None else f"{row['hmms_percent']:.1f} %"
        form = "{network} | {budget_bytes:bytes}, {budget_percent:.0f} % | {hmms} | {joint_percent:.1f} % | "
        form += "{bound_percent:.1f} % | {offloaded_bytes:bytes} | {recomputed_bytes:bytes} | {planning_seconds:.1f} s"
        table.add_row(*cells(form, row, hmms=hmms))
    return table


def batch_table(rows: Sequence[dict[str, Any]], memory_bytes: int) -> Table:
    table = new_table(
        f"Figure 10: largest batch in {format_bytes(memory_bytes)}",
        "<network | <plan | batch | times | images/s | loss",
    )
    for row in rows:
        for plan in ("keep_all", "hmms", "joint"):
            if plan in row:
                found = row[plan]
                cells = [str(found["batch"]), f"{found['times']:.2f}", f"{found['images_per_second']:.0f}"]
                table.add_row(row["network"], plan, *cells, f"{found['loss_percent']:.1f} %")
        times, loss = f"{row['paper_times']:.0f}", f"{row['paper_loss_percent']:.1f} %"
        table.add_row(row["network"], "Split-CNN + HMMS: the paper's; see bench.split_memory", "", times, "", loss)
    return table


def curve_table(figure: dict[str, Any]) -> Table:
    small, large = figure["batches"]
    table = new_table(
        f"Figure 11: projected speedup of VGG-19 at batch {large} over batch {small} (alpha {EFFICIENCY})",
        "Gbit/s | simulated, joint | paper, Split-CNN + HMMS",
    )
    for point in figure["curve"]:
        paper = f"{SPEEDUP_AT_10_GBPS}" if point["bandwidth_gbps"] == 10 else ""
        table.add_row(f"{point['bandwidth_gbps']:g}", f"{point['speedup']:.2f}", paper)
    return table


def _run(run: Run) -> None:
    batch, image = run.pick((BATCH, IMAGE), (QUICK_BATCH, QUICK_IMAGE))
    memory_bytes = run.pick(paper_machine().device.memory_bytes, 2**31)
    result = measure(batch, image, memory_bytes)
    run.save(**result)
    run.say(
        f"Simulated for {paper_machine().name}: {paper_machine().source}; x {CALIBRATION}",
        offloadable_table(result["figure_1"]),
        loss_table(result["figure_8"]),
        sweep_table(result["sweep"]),
        batch_table(result["figure_10"], memory_bytes),
        curve_table(result["figure_11"]),
    )


main = Bench(_run, quick="small images: does it run?")

if __name__ == "__main__":
    sys.exit(main())
