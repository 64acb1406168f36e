"""One network against its budgets: plain PyTorch, Shoal and the peers on the same tensors, as one JSON value."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.interleave import Clock
from bench.ours import Ours, Unsettled, least_budget, run_within
from bench.peers import PEERS, Confirmed, Scouted, candidates, fastest_within, least, scout
from bench.plain import Plain, plan_columns
from bench.workload import Forward, Workload, make_workload
from shoal.core.sizes import format_bytes
from shoal.engine.options import Options
from shoal.errors import BudgetError

_SLOW_SECONDS = 12.0  # a step that takes longer is repeated twice, without a warm-up of its own
_QUICK_SECONDS = 1.5  # one that takes less is repeated five times


@dataclass(frozen=True)
class Setting:
    """What one network is measured on.

    Attributes:
        batch, image: images in the batch, pixels along each side.
        scout_batches: two smaller batches on which the peers' settings are tried first; empty: the whole batch.
    """

    batch: int
    image: int
    scout_batches: tuple[int, ...] = ()

    def resized(self, batch: int | None, image: int | None) -> Setting:
        """With another batch or image, where one is given."""
        batch = batch or self.batch
        scouts = tuple(one for one in self.scout_batches if one < batch)
        return Setting(batch, image or self.image, scouts if len(scouts) == len(self.scout_batches) else ())


@dataclass(frozen=True)
class Measuring:
    """How to measure, the same for every network.

    Attributes:
        shares: budgets in percent of plain PyTorch's measured peak.
        values: of `activation_memory_budget`.
        peers: whether to run them.
        planner: of Shoal.
        repeats: timed steps of each contender; None: by how long a step takes.
        least: whether to look for the least feasible peak of each contender too.
        cpu_time: whether steps are timed by the CPU time of their one thread; else by the wall clock.
        device, seed: of everything.
    """

    shares: tuple[float, ...]
    values: tuple[float, ...]
    peers: bool = True
    planner: str = "joint"
    repeats: int | None = None
    least: bool = False
    cpu_time: bool = False
    device: str = "cpu"
    seed: int = 0

    @property
    def clock(self) -> Clock:
        return time.thread_time if self.cpu_time else time.perf_counter


OURS = {
    "shoal": "bitwise",
    "exact": "exact",
}  # Shoal twice: with plain PyTorch's bits, and with what is allowed by default

Advance = Callable[[str], None]


def measure_network(
    name: str, setting: Setting, options: Measuring, advance: Advance = lambda what: None
) -> dict[str, Any]:
    """Everything about one network.

    Args:
        name: one of `examples.networks.names()`.
        setting, options: on what and how.
        advance: called with what is about to run.

    Returns:
        Plain values for JSON: `plain`, `rows` (one per budget), `peers` (everything scouted), `least`.

    Raises:
        WrongResult: Shoal's training differs from plain PyTorch's.
    """
    started = time.perf_counter()
    workload = make_workload(name, setting.batch, setting.image, seed=options.seed, device=options.device)
    bench = _Network(workload, setting, options, advance)
    result = bench.run()
    result["minutes"] = (time.perf_counter() - started) / 60
    del bench, workload
    torch._dynamo.reset()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return result


class _Network:
    def __init__(self, workload: Workload, setting: Setting, options: Measuring, advance: Advance) -> None:
        self.workload = workload
        self.setting = setting
        self.options = options
        self.advance = advance

    def run(self) -> dict[str, Any]:
        workload, options = self.workload, self.options
        self.advance("plain PyTorch")
        plain = self.plain = Plain(workload)
        rough_seconds = workload.seconds(plain.forward, options.clock)
        self.slow = rough_seconds > _SLOW_SECONDS and options.device == "cpu"
        budgets = {share: plain.budget_bytes(share) for share in options.shares}
        ours = {(who, share): self._ours(share, budgets[share], who) for share in options.shares for who in OURS}
        scouted, failed = self._scout(max(budgets.values())) if options.peers else ([], {})
        confirmed = Confirmed(workload, self.advance)
        chosen = {
            (peer, share): fastest_within(_of(scouted, peer), budgets[share], confirmed.peak_bytes)
            for peer in PEERS
            for share in options.shares
        }
        forwards: dict[Any, Forward] = {key: run.forward for key, run in ours.items() if isinstance(run, Ours)}
        forwards |= {one.candidate: one.candidate.forward for one in chosen.values() if one is not None}
        self.advance(f"timing {1 + len(forwards)} contenders in turns")
        repeats = options.repeats or (2 if self.slow else 5 if rough_seconds < _QUICK_SECONDS else 3)
        times = plain.in_turns(forwards, repeats, warm_ups=0 if self.slow else 1, clock=options.clock)
        rows = []
        for share in options.shares:
            row: dict[str, Any] = {"share": share, "budget_bytes": budgets[share]}
            for who in OURS:
                run = ours[who, share]
                if isinstance(run, Ours):
                    row[who] = shoal_columns(run, budgets[share]) | times.columns((who, share))
                    row[who]["variant"] = str(run.plan.variant)
                else:
                    row[who] = refusal_columns(run)
            row["monet_percent"] = monet_overhead_percent(workload.name, share)
            for peer in PEERS if options.peers else ():
                one = chosen[peer, share]
                row[peer] = {"met": False}
                if one is not None:
                    row[peer] = {
                        "met": True,
                        "setting": one.candidate.setting,
                        "measured_peak_bytes": confirmed.peak_bytes(one),
                        **times.columns(one.candidate),
                    }
            rows.append(row)
        result = {
            "network": workload.name,
            "setting": asdict(self.setting),
            "options": asdict(options),
            "plain": plain.columns(times),
            "rows": rows,
            "peers": [
                {
                    "peer": one.candidate.peer,
                    "setting": one.candidate.setting,
                    "peak_bytes": confirmed.known.get(one.candidate, round(one.peak_bytes)),
                    "measured": one.exact or one.candidate in confirmed.known,
                    "scouted_seconds": one.seconds if math.isfinite(one.seconds) else None,
                }
                for one in scouted
            ],
            "peers_failed": failed,
        }
        if options.least:
            fit = [
                run.predicted_peak_bytes for (who, _), run in ours.items() if who == "shoal" and isinstance(run, Ours)
            ]
            result["least"] = self._least(min([plain.peak_bytes, *fit]), scouted, confirmed)
        return result

    def _ours(self, share: float, budget_bytes: int, who: str = "shoal") -> Ours | BudgetError | Unsettled:
        allow = OURS[who]
        self.advance(f"Shoal inside {share:g} % ({format_bytes(budget_bytes)}), {allow}")
        reference = self.plain.reference
        check = reference.check if who == "shoal" else reference.check_function
        options = Options(planner=self.options.planner)
        try:
            return run_within(self.plain, budget_bytes, check=check, brief=self.slow, allow=allow, options=options)
        except (BudgetError, Unsettled) as error:
            return error

    def _scout(self, most_bytes: int) -> tuple[list[Scouted], dict[str, str]]:
        workload, setting = self.workload, self.setting
        smaller = [
            make_workload(
                workload.name,
                batch,
                setting.image,
                seed=workload.seed,
                device=self.options.device,
                model=workload.model,
            )
            for batch in setting.scout_batches
        ]
        peers = candidates(workload, self.options.values)
        return scout(peers, workload, smaller, most_bytes, self.advance, self.options.clock)

    def _least(self, known_bytes: int, scouted: Sequence[Scouted], confirmed: Confirmed) -> dict[str, Any]:
        """The least feasible peak of each contender, really run."""
        plain = self.plain
        self.advance("the least feasible budget of Shoal")

        def figures(peak_bytes: int, forward: Forward) -> dict[str, Any]:
            times = plain.in_turns({"least": forward}, self.options.repeats or 2, warm_ups=0, clock=self.options.clock)
            share_percent = plain.share_percent(peak_bytes)
            return {"measured_peak_bytes": peak_bytes, "share_percent": share_percent, **times.columns("least")}

        budget_bytes = least_budget(self.workload, self.options.planner, known_bytes)
        run: Ours | BudgetError | Unsettled
        try:
            options = Options(planner=self.options.planner)
            run = run_within(self.plain, budget_bytes, brief=self.slow, allow=OURS["shoal"], options=options)
        except Unsettled as error:
            run = error
        except BudgetError as error:  # the measured peak was over it, and with that set aside nothing fits
            budget_bytes = error.least_feasible_bytes
            run = self._ours(plain.share_percent(budget_bytes), budget_bytes)
        found: dict[str, Any] = {}
        if isinstance(run, Ours):
            found["shoal"] = {"budget_bytes": budget_bytes, **figures(run.measured_peak_bytes, run.forward)}
        for peer in PEERS:
            one = least(_of(scouted, peer), confirmed.peak_bytes)
            if one is not None:
                found[peer] = {
                    "setting": one.candidate.setting,
                    **figures(confirmed.peak_bytes(one), one.candidate.forward),
                }
        return found


def shoal_columns(run: Ours, budget_bytes: int) -> dict[str, Any]:
    """Shoal's columns of one row, but for its times.

    `met`: the measured peak is inside the budget. `exceeded`: it is over it, which would break the contract; a budget
    that no plan fits is neither.
    """
    return {
        **plan_columns(run.plan),
        "met": run.measured_peak_bytes <= budget_bytes,
        "exceeded": run.measured_peak_bytes > budget_bytes,
        "measured_peak_bytes": run.measured_peak_bytes,
        "difference_percent": 100 * (run.measured_peak_bytes / run.predicted_peak_bytes - 1),
        "planning_seconds": run.planning_seconds,
        "repairs": run.repairs,
        "exactness": run.exactness,
    }


def refusal_columns(error: BudgetError | Unsettled) -> dict[str, Any]:
    """Shoal's columns of a row where it did not train: no plan fits, or every one was over the budget."""
    columns: dict[str, Any] = {
        "met": False,
        "exceeded": isinstance(error, Unsettled),
        "error": str(error).splitlines()[0],
    }
    if isinstance(error, BudgetError):
        columns["least_feasible_bytes"] = error.least_feasible_bytes
    return columns


def _of(scouted: Sequence[Scouted], peer: str) -> list[Scouted]:
    return [one for one in scouted if one.candidate.peer == peer]


SHARES = (66, 60, 53, 46, 40, 33)  # percent of plain PyTorch's peak

# MONeT (Shah et al., ICLR'21), float32 on one GPU: overhead in % of plain PyTorch's step at each of `SHARES`.
_MONET = {
    "resnet50": (3.22, 4.68, 5.56, 7.28, 9.31, 11.95),
    "googlenet": (7.13, 7.87, 8.44, 9.71, 12.14, 15.77),
    "unet": (-4.10, -2.07, -0.09, 1.39, 4.95, 11.51),
    "mobilenet_v2": (2.40, 3.10, 4.77, 5.53, 7.55, 8.72),
    "vgg16_bn": (-5.30, -4.64, -2.18, 1.99, 5.44, 9.11),  # theirs is VGG-16
}


def monet_overhead_percent(network: str, share: float) -> float | None:
    """MONeT's overhead for a network at a share (percent) of plain PyTorch's peak; None where the paper has none.

    >>> monet_overhead_percent("resnet50", 40)
    9.31
    """
    return dict(zip(SHARES, _MONET.get(network, ()), strict=False)).get(int(share) if share == int(share) else -1)
