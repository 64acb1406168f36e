"""`shoal doctor`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from shoal.app.cli import flags
from shoal.app.cli.console import WRONG, app, errors_reported, search_shown
from shoal.app.doctor.findings import as_json, as_lines
from shoal.app.doctor.subject import load_subject
from shoal.core.files import json_text
from shoal.cost.measurement_cache import device_of


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
