"""`shoal env`."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.cli.console import app, errors_reported
from shoal.app.environment import as_text, environment
from shoal.core.files import json_text


@app.command()
def env(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Show versions, devices, kernels, cache and settings, to paste into an issue."""
    with errors_reported(ctx):
        found = environment()
        typer.echo(json_text(found) if json else as_text(found))
