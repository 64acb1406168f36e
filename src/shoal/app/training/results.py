"""A run's folder, where one run at a time writes, and what it writes besides its checkpoint."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal import Plan
from shoal.app.training.options import Outcome, TrainOptions
from shoal.core.files import remove_partials, try_lock, write_json, write_text
from shoal.core.sizes import format_bytes
from shoal.errors import InputError
from shoal.memory.cpu_allocator import active
from shoal.report.data import Report
from shoal.report.page import save_html
from shoal.transforms.split.patch_map import PatchMap

log = logging.getLogger("shoal")
_held: set[int] = set()


def result(options: TrainOptions, outcome: Outcome) -> dict[str, Any]:
    """The run as plain values: its arguments, then its results. Bytes, seconds, and shares in 0..1."""
    return {
        **options.to_json(),
        "predicted_peak_bytes": outcome.predicted_peak_bytes,
        "measured_peak_bytes": outcome.measured_peak_bytes,
        "lower_bound_seconds": getattr(outcome.status, "lower_bound_seconds", None),
        "planning_seconds": getattr(outcome.status, "planning_seconds", None),
        "images_per_second": outcome.images_per_second,
        "losses": list(outcome.losses),
        "test_accuracies": list(outcome.accuracies),
        "test_accuracy": outcome.test_accuracy,
        "traffic": outcome.traffic,
        "travel": outcome.travel.splitlines(),
        "finished": not outcome.signal and not outcome.diverged,
        "diverged": outcome.diverged or None,
        "versions": versions(options),
    }


def in_words(options: TrainOptions, outcome: Outcome) -> dict[str, str]:
    """The results for people, by name."""
    accuracy, losses, measured_bytes = outcome.test_accuracy, outcome.losses, outcome.measured_peak_bytes
    shown = {"test accuracy": "not tested" if accuracy is None else f"{accuracy:.1%}"}
    if losses:
        shown["loss"] = f"{losses[0]:.4f} at first, {losses[-1]:.4f} at last"
    shown["images per second"] = f"{outcome.images_per_second:.0f}" if outcome.images_per_second else "no step ran"
    if outcome.predicted_peak_bytes:
        shown["predicted peak"] = format_bytes(outcome.predicted_peak_bytes)
    if measured_bytes is not None:
        shown["measured peak"] = format_bytes(measured_bytes)
        if budget_bytes := options.budget_bytes:
            share = f"{measured_bytes / budget_bytes:.1%}"
            shown["measured peak"] += f", {share} of the budget of {format_bytes(budget_bytes)}"
    return shown | bytes_by_kind(outcome.traffic)


def save_results(options: TrainOptions, outcome: Outcome, json_path: Path | None) -> Path | None:
    """Write everything into `options.out`, and the result to `json_path` if there is one.

    Returns:
        The report page; None for plain PyTorch, which has no plan to report on.

    Raises:
        InputError: a file cannot be written.
    """
    if json_path is not None:
        write_json(json_path, result(options, outcome))
    if outcome.plan is None:
        return None
    outcome.plan.save(options.out / "plan.json")
    outcome.plan.save_trace(options.out / "trace.json")
    report = Report(
        timeline=outcome.plan.timeline,
        plan=outcome.plan,
        measured_peak_bytes=outcome.measured_peak_bytes,
        losses=tuple(loss for loss in outcome.losses if isfinite(loss)),
        accuracies=outcome.accuracies,
        title=f"{options.model} on {options.data}",
        settings={
            name: str(value)
            for name, value in {**options.to_json(), **versions(options)}.items()
            if value is not None and name not in ("budget_bytes", "resume", "planner")
        },
        outcome=in_words(options, outcome),
        patches=outcome.patches,
        image=outcome.image,
    )
    return save_html(report, options.out / "report.html")


def save_plan(plan: Plan, folder: Path, patches: PatchMap | None = None) -> tuple[Path, Path, Path]:
    """Write plan.json, plan.html, which draws the patches of a split network, and trace.json.

    Raises:
        InputError: a file cannot be written.
    """
    return (
        plan.save(folder / "plan.json"),
        save_html(Report(timeline=plan.timeline, plan=plan, patches=patches), folder / "plan.html"),
        plan.save_trace(folder / "trace.json"),
    )


def versions(options: TrainOptions) -> dict[str, Any]:
    """What a result depends on besides the arguments."""
    return {
        "shoal": shoal.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu_allocator": active(),
        "seed": options.seed,
    }


def check_writable(folder: Path) -> None:
    """Make `folder` and see that files can be written there, before hours of training.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; give another one") from error
    write_text(folder / ".writable", "").unlink(missing_ok=True)  # another process may look at the same time


def bytes_by_kind(traffic: Mapping[str, Any] | None) -> dict[str, str]:
    """The bytes that training put on the wire: a line for each kind of `Traffic.to_json`, the mean over all steps.

    >>> total = {"gradients": {"sent_bytes": 2 * 2**20, "raw_bytes": 8 * 2**20}}
    >>> bytes_by_kind({"steps": 2, "total": total})
    {'gradients sent': '1.000 MiB a step, 25.0 % of the 4.000 MiB that float32 takes'}
    """
    if traffic is None or not traffic["steps"]:
        return {}
    return {f"{kind} sent": _words(sent, traffic["steps"]) for kind, sent in traffic["total"].items()}


def _words(sent: Mapping[str, int], steps: int) -> str:
    sent_bytes, raw_bytes = sent["sent_bytes"] // steps, sent["raw_bytes"] // steps
    share = f"{100 * sent_bytes / raw_bytes:.1f} % of the {format_bytes(raw_bytes)}" if raw_bytes else "none"
    return f"{format_bytes(sent_bytes)} a step, {share} that float32 takes"


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make `folder`, and keep every other run out of it until this block ends, or this process, however it ends.

    The folder itself is locked: nothing is left over that a later run would have to remove. What an earlier run that
    was killed left half written is removed. Of several ranks, the one that writes calls it.

    Raises:
        InputError: the folder cannot be made or written, or another run writes there.
    """
    check_writable(folder)
    handle = os.open(folder, os.O_RDONLY)
    _held.add(handle)
    try:
        try:
            free = try_lock(handle)
        except OSError as error:
            log.warning("%s cannot be locked (%s): see that no other run writes there", folder, error.strerror)
            free = True
        if not free:
            raise InputError(f"another run is writing to {folder}; wait for it to end, or give another --out")
        remove_partials(folder)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def _let_go_in_a_child() -> None:
    """A loader's worker that outlives a killed run must not keep its folder locked."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_a_child)
