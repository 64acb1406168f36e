"""`shoal doctor`: an examination as ten lines for who asked, and as plain values."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from shoal.app import flags
from shoal.app.cli.console import WRONG, app, errors_reported, search_shown
from shoal.app.doctor.subject import load_subject
from shoal.core.added_time import MEASURED_SECONDS, added_text, milliseconds
from shoal.core.columns import aligned
from shoal.core.files import json_text
from shoal.core.sizes import format_bytes
from shoal.cost.measurement_cache import device_of
from shoal.lowlevel import cuda_calls

if TYPE_CHECKING:
    from shoal.app.doctor.examine import Examination, Taken

_ONE_GRAPH = "take the named line out: one graph has more means, and less has to be kept"
_SLOWER = 0.1  # of the plain step: what a plan adds from which on more bytes are worth naming


@app.command()
def doctor(
    ctx: typer.Context,
    where: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function without arguments that returns a model, or a model and its input; also MODULE:FUNCTION.",
            show_default=False,
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(help="Device bytes a step may use, such as 2GiB or 80%; by default what the device has left."),
    ] = None,
    example: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of an input, such as 8x3x224x224 or labels=8:int64; once for each.", show_default=False
        ),
    ] = None,
    optimizer: flags.StateOf = "sgd-momentum",
    allow: flags.Allow = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default where the model is.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Take one step of your model, plain and planned: does it fit, what would help most, what breaks capture.

    The loss is the mean square of the model's outputs. Exit code 0 where the planned step fits, 2 where it does not.
    """
    from shoal.app.doctor.examine import examine  # and with it Dynamo, two seconds that `shoal --help` does not need

    with errors_reported(ctx):
        if device is not None:
            device = str(device_of(device))
        named = None if optimizer == "none" else optimizer
        with redirect_stdout(sys.stderr), search_shown("doctor") as doing:  # a model may print
            subject = load_subject(where, example or (), device)
            found = examine(subject, budget, optimizer=named, allow=allow, doing=doing)
        typer.echo(json_text(as_json(found)) if json else "\n".join(as_lines(found)))
        if not found.fits_planned:
            raise typer.Exit(WRONG)


def as_lines(found: Examination) -> list[str]:
    """Ten lines: what was examined, whether it fits, what would help most, what breaks capture, what to type."""
    subject = found.subject
    device = "cpu" if subject.device.type == "cpu" else cuda_calls.device_name(subject.device)
    rows = {
        subject.name: f"{subject.where}, input {subject.shapes}, torch {torch.__version__} on {device}",
        "budget": f"{format_bytes(found.budget_bytes)}, optimizer {found.optimizer or 'none declared'}",
        "plain step": _plain(found),
        "planned step": _planned(found),
        "by means of": _means(found),
        "at the peak": _at_the_peak(found),
        "gradients": _gradients(found),
        "capture": _capture(found),
        "helps most": _helps(found),
        "type": _type(found),
    }
    return aligned(rows.items())


def as_json(found: Examination) -> dict[str, Any]:
    """The same as plain values."""
    plan = found.plan
    return {
        "model": found.subject.name,
        "where": found.subject.where,
        "input": found.subject.shapes,
        "budget_bytes": found.budget_bytes,
        "optimizer": found.optimizer,
        "optimizer_state_bytes": found.state_bytes,
        "parameter_bytes": found.parameter_bytes,
        "fits_plain": found.fits_plain,
        "fits_planned": found.fits_planned,
        "plain_peak_bytes": found.plain_peak_bytes,
        "plain_seconds": None if found.plain is None else found.plain.seconds,
        "predicted_peak_bytes": None if plan is None or found.refused else plan.predicted_peak_bytes,
        "measured_peak_bytes": None if found.planned is None else found.planned.peak_bytes,
        "planned_seconds": None if found.planned is None else found.planned.seconds,
        "least_bytes": found.least_bytes,
        "gradient_difference": found.difference,
        "breaks": list(found.breaks),
        "uncaptured": found.uncaptured or None,
        "refused": found.refused or None,
        "remedies": list(found.remedies),
        "type": _type(found),
    }


def _plain(found: Examination) -> str:
    peak_bytes = found.plain_peak_bytes
    if found.plain is None:
        predicted = "" if peak_bytes is None else f"; predicted {format_bytes(peak_bytes)}"
        return f"{found.plain_reason}{predicted}"
    took = f"{milliseconds(found.plain.seconds)} ms"
    if peak_bytes is None:
        return f"{took}; its peak could not be measured"
    verdict = "fits" if found.fits_plain else "does not fit"
    return f"{verdict}: {format_bytes(peak_bytes)}, {took}"


def _planned(found: Examination) -> str:
    least = "" if found.least_bytes is None else f"; {format_bytes(found.least_bytes)} are enough"
    if found.uncaptured:
        return "not taken: nothing of the model can be captured"
    if found.planned is None:
        return f"does not fit{least or f': {found.refused}'}"
    peak_bytes = found.planned.peak_bytes
    measured = "not measured" if peak_bytes is None else format_bytes(peak_bytes)
    slower = ""
    if found.plain is not None:
        added = added_text(found.planned.seconds, found.plain.seconds, MEASURED_SECONDS)
        slower = f", {added} (one step each)"
    verdict = "fits" if found.fits_planned else "is over the budget"
    return f"{verdict}: {measured}, {milliseconds(found.planned.seconds)} ms{slower}{least}"


def _means(found: Examination) -> str:
    plan = found.plan
    if plan is None or found.planned is None:
        return "nothing"
    parts = [
        f"{len(storages)} {how} ({format_bytes(sum(storage.nbytes for storage in storages))})"
        for how, storages in (("recomputed", plan.recomputed), ("offloaded", plan.offloaded), ("encoded", plan.encoded))
        if storages
    ]
    return f"computed {plan.variant}; {', '.join(parts) or 'everything is kept'}"


def _at_the_peak(found: Examination) -> str:
    plan = found.plan
    if plan is None:
        return f"not known; parameters take {format_bytes(found.parameter_bytes)}, their gradients as much"
    peak = plan.timeline.peak
    saved_bytes = peak.kept_bytes + peak.recomputed_bytes + peak.fetched_bytes
    return (
        f"{peak.op} of {peak.layer or 'the model'} ({peak.phase}): standing {format_bytes(peak.resident_bytes)}, "
        f"gradients {format_bytes(peak.gradient_bytes)}, saved {format_bytes(saved_bytes)}, "
        f"others {format_bytes(peak.activation_gradient_bytes + peak.workspace_bytes)}"
    )


def _gradients(found: Examination) -> str:
    if found.difference is None:
        return "not compared, as one of the two steps was not taken"
    if found.difference == 0:
        return "equal plain PyTorch's bit for bit"
    return f"differ from plain PyTorch's by {found.difference:.0e} of the largest gradient at most"


def _capture(found: Examination) -> str:
    if found.uncaptured:
        return found.uncaptured
    if found.breaks:
        verb = "refused" if found.refused else "planned"
        return f"breaks at {'; '.join(found.breaks)}: {verb} as several graphs, and what crosses is kept"
    return "one graph"


def _helps(found: Examination) -> str:
    if found.uncaptured:
        return "take the named line out of the forward pass, or offload eagerly: shoal.offload_activations()"
    more_bytes = [] if found.least_bytes is None else ["the bytes named above"]
    if found.remedies:
        return "; or ".join([*found.remedies, *more_bytes])
    if found.refused and found.breaks:
        return f"{_ONE_GRAPH}; or more bytes, or smaller inputs"
    if found.refused:
        return f"{', or '.join([*more_bytes, 'smaller inputs'])}; no smaller batch that was planned fits"
    if found.breaks:
        return _ONE_GRAPH
    if found.fits_plain:
        return "nothing is needed; shoal.fit finds the largest batch inside these bytes"
    plain_bytes = found.plain_peak_bytes
    if found.plain and found.planned and plain_bytes and _is_slower(found.planned, found.plain):
        return f"more bytes, up to {format_bytes(plain_bytes)}: `shoal.frontier` shows the time for each budget"
    return "nothing is needed"


def _is_slower(planned: Taken, plain: Taken) -> bool:
    """By more than a single step tells."""
    return planned.seconds > (1 + _SLOWER) * max(plain.seconds, MEASURED_SECONDS)


def _type(found: Examination) -> str:
    if found.uncaptured:
        return "with shoal.offload_activations(): loss = criterion(model(x), y)"
    named = f', optimizer="{found.optimizer}"' if found.optimizer else ", optimizer=optimizer"
    given = json.dumps(_size(found.budget_bytes) if found.budget is None else found.budget)
    if found.refused and not found.remedies:
        if found.least_bytes is None:
            return "nothing yet: no budget was found that works"
        given = str(found.least_bytes)
    changed = "  # with the change above" if found.remedies else ""
    return f"model = shoal.compile(model, budget={given}{named}){changed}"


def _size(size_bytes: int) -> str:
    """A size as one would type it.

    >>> _size(2**31), _size(150 * 2**20), _size(12345)
    ('2GiB', '150MiB', '12345')
    """
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)
