"""The chain of 16 x Conv-BN-ReLU: how low does the peak go, and does a lower budget ever raise it?

    python -m bench.chain            minutes on two cores
    python -m bench.chain --quick    the same on a few pixels

Peaks are percent of plain PyTorch's. PyTorch's `activation_memory_budget` is U-shaped on this chain, since it
recomputes early; Shoal's measured peaks must fall with the budget, down to where it says that no plan fits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn

from bench.frame import Bench, Run, WrongResult, option, use_exact_kernels
from bench.ours import Ours, Unsettled, least_budget, run_within
from bench.peers import CHECKPOINT, Scouted, candidates, scout
from bench.plain import PLAIN, Plain
from bench.tables import new_table
from bench.workload import Forward, Workload
from shoal.core.sizes import format_bytes
from shoal.engine.options import Options
from shoal.errors import BudgetError

BLOCKS = 16
CHANNELS = 32
BATCH, IMAGE = 8, 128
QUICK_BATCH, QUICK_IMAGE = 2, 32
VALUES = (1.0, 0.7, 0.5, 0.3, 0.2, 0.0)  # of activation_memory_budget
LADDER = (100, 90, 80, 70, 60, 50, 45, 40, 36, 32, 28, 24, 20, 16, 12, 8)  # budgets in percent of plain PyTorch's peak


class Chain(nn.Module):
    """`blocks` times Conv-BN-ReLU at one resolution, then a mean and ten classes."""

    def __init__(self, blocks: int = BLOCKS, channels: int = CHANNELS) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block in range(blocks):
            layers.append(nn.Conv2d(channels if block else 3, channels, 3, padding=1, bias=False))
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) → (N, 10)."""
        return self.layers(x)


def measure_chain(
    batch: int, image: int, *, repeats: int = 3, device: str = "cpu", seed: int = 0, planner: str = "joint"
) -> dict[str, Any]:
    """Every contender's peak and time on the chain, and the least that is feasible.

    Args:
        batch, image: images in the batch, pixels along each side.
        repeats: timed steps of each contender.
        device, seed: of everything.
        planner: of Shoal.

    Raises:
        WrongResult: a lower budget gave a higher peak, or a peak was over its budget.
        WrongResult: Shoal's training differs from plain PyTorch's.
    """
    torch.manual_seed(seed)
    model = Chain().to(device)
    images = torch.randn(batch, 3, image, image).to(device)
    target = torch.randint(10, (batch,)).to(device)
    workload = Workload(f"chain of {BLOCKS}", model, images, target, seed)
    plain = Plain(workload)

    ladder: list[tuple[int, Ours]] = []
    infeasible: BudgetError | None = None
    for share in LADDER:
        budget_bytes = plain.budget_bytes(share)
        try:
            ladder.append((budget_bytes, run_within(plain, budget_bytes, options=Options(planner=planner))))
        except BudgetError as error:
            infeasible = error
            break
        except Unsettled as error:
            raise WrongResult(f"at {share} %: {error}") from error
    least_bytes = least_budget(workload, planner, min([plain.peak_bytes, *(b for b, _ in ladder)]))
    if all(least_bytes < budget_bytes for budget_bytes, _ in ladder):
        ladder.append((least_bytes, run_within(plain, least_bytes, options=Options(planner=planner))))
    check_falling([(budget_bytes, run.measured_peak_bytes) for budget_bytes, run in ladder])

    scouted, failed = scout(candidates(workload, VALUES), workload, advance=lambda what: None)
    forwards: dict[Any, Forward] = {budget_bytes: run.forward for budget_bytes, run in ladder}
    forwards |= {one.candidate: one.candidate.forward for one in scouted}
    times = plain.in_turns(forwards, repeats)

    def figures(key: Any, peak_bytes: float) -> dict[str, Any]:
        share_percent = plain.share_percent(peak_bytes)
        return {"measured_peak_bytes": peak_bytes, "share_percent": share_percent, **times.columns(key)}

    def peer(one: Scouted) -> dict[str, Any]:
        candidate = one.candidate
        return {"peer": candidate.peer, "setting": candidate.setting, **figures(candidate, one.peak_bytes)}

    return {
        "setting": {"blocks": BLOCKS, "channels": CHANNELS, "batch": batch, "image": image},
        "plain": figures(PLAIN, plain.peak_bytes),
        "ladder": [
            {
                "budget_bytes": budget_bytes,
                "budget_percent": plain.share_percent(budget_bytes),
                "predicted_peak_bytes": run.predicted_peak_bytes,
                "exactness": run.exactness,
                **figures(budget_bytes, run.measured_peak_bytes),
            }
            for budget_bytes, run in ladder
        ],
        "infeasible": str(infeasible).splitlines()[0] if infeasible else None,
        "peers": [peer(one) for one in scouted],
        "peers_failed": failed,
    }


def check_falling(budgets_and_peaks: Sequence[tuple[int, int]]) -> None:
    """Raise WrongResult unless every peak is inside its budget and none is above that of a larger budget.

    >>> check_falling([(100, 90), (80, 80)])
    """
    above: int | None = None
    for budget_bytes, peak_bytes in sorted(budgets_and_peaks, reverse=True):
        if peak_bytes > budget_bytes:
            raise WrongResult(f"the budget of {format_bytes(budget_bytes)} was exceeded: {format_bytes(peak_bytes)}")
        if above is not None and peak_bytes > above:
            raise WrongResult(
                f"the budget of {format_bytes(budget_bytes)} gave a peak of {format_bytes(peak_bytes)}; a larger "
                f"budget gave {format_bytes(above)}"
            )
        above = peak_bytes


def chain_table(result: dict[str, Any]) -> Table:
    """Peaks in percent of plain PyTorch's and the time added, for every contender and setting."""
    setting = result["setting"]
    table = new_table(
        f"{setting['blocks']} x Conv-BN-ReLU, {setting['batch']} x {setting['image']} pixels: plain PyTorch "
        f"{format_bytes(result['plain']['measured_peak_bytes'])}",
        "<contender | <setting | peak | added",
    )
    rows = [("shoal", f"budget {row['budget_percent']:.1f} %", row) for row in result["ladder"]]
    rows += [(row["peer"], row["setting"], row) for row in result["peers"]]
    for contender, name, row in rows:
        table.add_row(contender, name, f"{row['share_percent']:.1f} %", f"{row['added_percent']:+.1f} %")
    return table


def summary_line(result: dict[str, Any]) -> str:
    """The least peak of each contender."""
    least = min(row["share_percent"] for row in result["ladder"])
    parts = [f"no U shape; least feasible peak of Shoal {least:.1f} % of plain PyTorch's"]
    for peer in dict.fromkeys(row["peer"] for row in result["peers"]):
        row = min((row for row in result["peers"] if row["peer"] == peer), key=lambda row: row["share_percent"])
        name = "checkpoint_sequential" if peer == CHECKPOINT else peer
        parts.append(f"{name} {row['share_percent']:.1f} % ({row['setting']})")
    return "; ".join(parts)


def _run(run: Run) -> None:
    use_exact_kernels()
    batch, image = run.pick((BATCH, IMAGE), (QUICK_BATCH, QUICK_IMAGE))
    how = {"repeats": run.asked.repeats, "seed": run.asked.seed, "planner": run.asked.planner}
    result = measure_chain(batch, image, device=run.device.type, **how)
    run.save(**result)
    run.say(chain_table(result), summary_line(result))


main = Bench(
    _run,
    option("--repeats", type=int, default=3, help="timed steps of each contender"),
    option("--planner", default="joint", help="Shoal's planner"),
    quick="a few pixels: does it run?",
    device=True,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
