"""Networks × budgets × what is allowed: which form of the step is chosen, and is it the fastest there is?

    python -m bench.one_plan                                  every network and budget: hours on two cores
    python -m bench.one_plan --quick                          the same on tiny inputs, to see that it runs
    python -m bench.one_plan --networks resnet50 --shares 53,40 --ablation
    python -m bench.one_plan --networks timm/convnext_tiny    of timm, here 1.0.31; skipped where it does not import
    python -m bench.one_plan --resume runs/bench/one_plan_....json   budgets that it has are not measured again

The file is written after each budget.

Budgets are shares of plain PyTorch's peak, measured here as in `bench.budgets`. Each is given to `shoal.compile` with
allow="recompute", "exact" and "lossy"; with `--ablation` also with each means alone ("fuse" fits only where nothing has
to be recomputed). All that fit are timed in turns with plain PyTorch.

Before anything is timed, "recompute" is held against plain PyTorch bit by bit, and what computes the same function
against float64, from which plain PyTorch's own float32 step is off too. Of what is lossy, the loss and the statistics
of batch norms are held: bit by bit where the step has the model's own form, against `shoal.split` where its patches are
independent. The reference in float64 takes twice plain PyTorch's bytes.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from bench.budgets import SETTINGS
from bench.frame import CPU_TIME, NETWORKS, Bench, Run, Unavailable, bar, option, percentages, switch, use_exact_kernels
from bench.interleave import Clock
from bench.lossy_budgets import check_forward
from bench.network import Setting, monet_overhead_percent, refusal_columns, shoal_columns
from bench.ours import Ours, Unsettled, run_within
from bench.plain import Plain, Times, heading
from bench.reference import take_reference
from bench.tables import cells, new_table
from bench.workload import Forward, Workload, make_workload
from shoal.core.means import BITWISE, EXACT, means_of
from shoal.core.plan import Plan
from shoal.core.variant import WHOLE
from shoal.engine.plan import plan as plan_model
from shoal.errors import BudgetError
from shoal.transforms.split.split import split

SHARES = (100.0, 66.0, 53.0, 40.0, 33.0, 25.0, 20.0, 15.0, 10.0)
QUICK_SHARES = (95.0,)  # parameters and gradients are up to 91 % of so small a step
TIMM_SETTINGS = {  # parameters and gradients are under 15 % of plain PyTorch's peak
    "timm/efficientnet_b0": Setting(8, 288),
    "timm/convnext_tiny": Setting(8, 320),
    "timm/hrnet_w18_small": Setting(8, 320),
}
QUICK_SETTINGS = {name: Setting(4, 64) for name in SETTINGS | TIMM_SETTINGS} | {
    "unet": Setting(2, 64),
    "unet3d": Setting(1, 32),
}
ALLOWED = ("recompute", "exact", "lossy")
ABLATION = ("recompute", "fuse", "recompute, fuse", "recompute, exact_split", "exact", "lossy")
_PREDICTED_WITHIN = 2.0  # percent of the peak
_STEP_WITHIN = 10.0  # percent of the measured step
_SLOWER = 3.0  # percent of plain PyTorch's step by which "exact" may be slower than the best single means


def check(plain: Plain, allow: str, forward: Forward, who: str) -> str:
    """Take a step and hold it against plain PyTorch's, as closely as what is allowed promises.

    Raises:
        WrongResult: it differs.
    """
    means = means_of(allow)
    if means <= BITWISE:
        return plain.reference.check(forward, who)
    if means <= EXACT:
        return plain.reference.check_function(forward, who)
    plain.workload.reset()  # or gradients of the contender before would count as held
    plain.workload.step(forward)  # chooses the form
    variant = forward.shoal.plan.variant  # type: ignore[attr-defined]
    if variant == WHOLE:
        return check_forward(plain, forward, who)
    if variant.exact:
        return plain.reference.check_function(forward, who, gradients=False)
    plain.reference.start()
    by_hand = split(plain.workload.shared_copy(), variant.depth, variant.grid, join="auto")
    reference = take_reference(plain.workload, by_hand)
    return f"split: {reference.check_function(forward, who, gradients=False)}"


def measure_network(
    name: str,
    setting: Setting,
    shares: Sequence[float],
    allowed: Sequence[str],
    repeats: int,
    seed: int,
    advance: Callable[[str], None] = lambda what: None,
    clock: Clock = time.perf_counter,
    known: Mapping[float, dict[str, Any]] = MappingProxyType({}),
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Every contender at every budget, as plain values.

    Args:
        known: rows by their share that an earlier run has measured.
        keep: given all rows so far after each that is measured.
    """
    advance("plain PyTorch")
    plain = Plain(make_workload(name, setting.batch, setting.image, seed=seed))
    least = _Least(plain.workload)
    rows = dict(known)
    times = Times({})

    def so_far() -> dict[str, Any]:
        in_order = [rows[share] for share in sorted(rows, reverse=True)]
        return {"network": name, "setting": asdict(setting), "plain": plain.columns(times), "rows": in_order}

    for share in shares:
        if share in known:
            continue
        budget_bytes = plain.budget_bytes(share)
        runs: dict[str, Ours | BudgetError | Unsettled] = {}
        for allow in allowed:
            advance(f"{share:g} %, {allow}")
            try:
                runs[allow] = run_within(plain, budget_bytes, check=partial(check, plain, allow), allow=allow)
            except (BudgetError, Unsettled) as error:
                runs[allow] = least.of(allow) if getattr(error, "least_feasible_bytes", 0) is None else error
        fit = {allow: run for allow, run in runs.items() if isinstance(run, Ours)}
        advance(f"{share:g} %: timing {1 + len(fit)} contenders in turns")
        times = plain.in_turns({allow: run.forward for allow, run in fit.items()}, repeats, clock=clock)
        rows[share] = {
            "share": share,
            "budget_bytes": budget_bytes,
            "monet_percent": monet_overhead_percent(name, share),
            "contenders": {allow: _columns(allow, runs[allow], budget_bytes, times) for allow in allowed},
        }
        keep(so_far())
        del runs, fit
        torch._dynamo.reset()
        gc.collect()
    return so_far()


class _Least:
    """What a step needs, where the budget is less than its parameters and gradients and so nothing was planned."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._known = workload, dict[str, BudgetError]()

    def of(self, allow: str) -> BudgetError:
        workload = self._workload
        if allow not in self._known:
            hopeless_bytes = workload.resident_bytes + workload.parameter_bytes
            try:
                plan_model(workload.model, workload.images, hopeless_bytes, allow=allow, name=workload.name)
            except BudgetError as error:
                self._known[allow] = error
        return self._known[allow]


def _columns(allow: str, run: Ours | BudgetError | Unsettled, budget_bytes: int, times: Times) -> dict[str, Any]:
    if not isinstance(run, Ours):
        return refusal_columns(run)
    measured = times.columns(allow)
    step_off = run.plan.predicted_seconds / statistics.median(measured["seconds"]) - 1
    found = shoal_columns(run, budget_bytes) | measured | of_all_variants(run.plan)
    return found | {"variant": str(run.plan.variant), "step_off_percent": 100 * step_off}


def of_all_variants(plan: Plan) -> dict[str, Any]:
    """Predicted added time and its lower bound over all forms that were priced, in percent of the model's own form
    with everything kept."""
    whole = next((one for one in plan.candidates if one.variant == WHOLE), None)
    plain_seconds = whole.plain_seconds if whole is not None else plan.plain_seconds
    bounds = [one.bound_seconds for one in plan.candidates if one.bound_seconds is not None]
    bound_seconds = min(bounds, default=plan.plain_seconds + plan.least_added_seconds)
    return {
        "predicted_seconds": plan.predicted_seconds,
        "predicted_added_percent": 100 * (plan.predicted_seconds / plain_seconds - 1),
        "lower_bound_percent": 100 * (bound_seconds / plain_seconds - 1),
        "candidates": [one.cells() for one in plan.candidates],
    }


def network_table(result: Mapping[str, Any]) -> Table:
    """One row for each contender in each budget of one network."""
    table = new_table(
        escape(heading(result)),
        "budget | <allow | <computed | <met | predicted | measured | off | added | predicted | bound | step off | "
        "planned | MONeT",
    )
    for row in result["rows"]:
        budget = cells("{share:g} %, {budget_bytes:bytes}", row)[0]
        for allow, found in row["contenders"].items():
            shown = [budget, allow, found.get("variant", "-"), _met(found)]
            form = "{predicted_peak_bytes:bytes} | {measured_peak_bytes:bytes} | {difference_percent:+.2f} % | "
            form += "{added_percent:+.1f} % | {predicted_added_percent:+.1f} % | {lower_bound_percent:+.1f} % | "
            form += "{step_off_percent:+.0f} % | {planning_seconds:.1f} s | {monet_percent:+.1f} %"
            shown += cells(form, found, monet_percent=row["monet_percent"])
            shown[4] = shown[4] or cells("≥ {least_feasible_bytes:bytes}", found)[0]
            table.add_row(*map(escape, shown))
            budget = ""
        table.add_section()
    return table


def _met(found: Mapping[str, Any]) -> str:
    return "yes" if found["met"] else "EXCEEDED" if found["exceeded"] else "infeasible"


def is_slower(contenders: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether "exact" is more than 3 % of plain PyTorch's step slower than another that computes the same function.

    >>> rows = {"exact": {"met": True, "added_percent": 5.0}, "recompute": {"met": True, "added_percent": 1.0}}
    >>> is_slower(rows), is_slower({"exact": {"met": False}, "recompute": {"met": False}})
    (True, False)
    """
    single = [
        found["added_percent"]
        for allow, found in contenders.items()
        if found["met"] and allow != "exact" and means_of(allow) <= EXACT
    ]
    ours = contenders.get("exact")
    if ours is None or not single:
        return False
    return not ours["met"] or ours["added_percent"] > min(single) + _SLOWER


def summary(results: Collection[Mapping[str, Any]]) -> dict[str, int]:
    """The totals over all rows."""
    rows = [row for result in results for row in result["rows"]]
    all_found = [found for row in rows for found in row["contenders"].values()]
    ran = [found for found in all_found if "measured_peak_bytes" in found]
    in_paper = [
        (row["contenders"]["exact"]["added_percent"], row["monet_percent"])
        for row in rows
        if row["monet_percent"] is not None and row["contenders"].get("exact", {}).get("met")
    ]
    return {
        "budgets": len(all_found),
        "met": sum(found["met"] for found in all_found),
        "exceeded": sum(found["exceeded"] for found in all_found),
        "infeasible": sum(not found["met"] and not found["exceeded"] for found in all_found),
        "ran": len(ran),
        "peak_within_2_percent": sum(abs(found["difference_percent"]) <= _PREDICTED_WITHIN for found in ran),
        "step_within_10_percent": sum(abs(found["step_off_percent"]) <= _STEP_WITHIN for found in ran),
        "rows": len(rows),
        "exact_slower": sum(is_slower(row["contenders"]) for row in rows),
        "compared_with_monet": len(in_paper),
        "half_of_monet": sum(added <= theirs / 2 for added, theirs in in_paper),
    }


def summary_line(totals: Mapping[str, int]) -> str:
    """The totals in a sentence."""
    return (
        "{met} of {budgets} budgets met, {exceeded} exceeded, {infeasible} infeasible; of {ran} that ran the peak is "
        "predicted within 2 % in {peak_within_2_percent}, the step within 10 % in {step_within_10_percent}; exact more "
        "than 3 % slower than the best single means in {exact_slower} of {rows}; at or under half of MONeT's overhead "
        "in {half_of_monet} of {compared_with_monet}"
    ).format_map(totals)


def known_rows(
    earlier: Mapping[str, Any] | None, setting: Setting, allowed: Collection[str]
) -> dict[float, dict[str, Any]]:
    """The rows of an earlier run by their share; none where its step was another or a contender is missing."""
    if earlier is None or earlier["setting"] != json.loads(json.dumps(asdict(setting))):
        return {}
    return {row["share"]: row for row in earlier["rows"] if set(allowed) <= set(row["contenders"])}


def _run(run: Run) -> int:
    asked = run.asked
    settings = run.chosen(SETTINGS | TIMM_SETTINGS, QUICK_SETTINGS)
    settings = {name: one.resized(asked.batch, asked.image) for name, one in settings.items()}
    shares = asked.shares or run.pick(SHARES, QUICK_SHARES)
    use_exact_kernels()
    results: list[dict[str, Any]] = []
    earlier = {result["network"]: result for result in run.resume("results").get("results", ())}
    allowed = ABLATION if asked.ablation else asked.allow or ALLOWED
    repeats = asked.repeats or run.pick(5, 1)

    def keep(found: dict[str, Any]) -> None:
        measured = {one["network"]: one for one in (*results, found)}
        both = list((earlier | measured).values())  # what is still to come is not lost where this ends early
        run.save(results=both, skipped=run.skipped, summary=summary(both))

    with bar(len(settings)) as show:
        for name, setting in settings.items():
            known = known_rows(earlier.get(name), setting, allowed)
            if set(shares) <= set(known):
                results.append(earlier[name])
                continue
            try:
                advance = partial(show, name)
                found = measure_network(
                    name, setting, shares, allowed, repeats, asked.seed, advance, run.clock, known, keep
                )
            except Unavailable as error:
                run.skip(name, error)
                continue
            results.append(found)
            run.say(network_table(found))
            show(name, "done", 1)
    run.reject_nothing(results)
    run.say(summary_line(summary(results)))
    return int(summary(results)["exceeded"] > 0)


main = Bench(
    _run,
    NETWORKS,
    option("--shares", type=percentages, help="budgets in percent of plain PyTorch's peak, comma-separated"),
    option("--allow", known=ALLOWED),
    switch("--ablation", "all of these, and each means alone"),
    option("--batch", type=int, help="images in the batch, of every network"),
    option("--image", type=int, help="pixels along each side, of every network"),
    option("--repeats", type=int, help="timed steps of each contender; by default 5"),
    CPU_TIME,
    quick="tiny inputs, one repeat: does it run?",
    resume="keep the budgets that this file has, and measure the others",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
