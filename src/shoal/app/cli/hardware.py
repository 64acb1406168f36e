"""`shoal hardware`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shoal.app.cli.console import app, errors_reported, output
from shoal.app.training.prepare import device as device_called
from shoal.core import presets
from shoal.core.files import json_text
from shoal.cost.measure import measure
from shoal.cost.measure_links import measure_links


@app.command()
def hardware(
    ctx: typer.Context,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    folder: Annotated[
        str | None, typer.Option(help="Where the CPU's offload to a file is measured; by default the system's /tmp.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show this machine, which takes seconds to measure the first time, and the presets to plan for."""
    with errors_reported(ctx):
        device = str(device_called(device))
        links = measure_links(device, folder=folder)
        here, *elsewhere = machines = [measure(device), *map(presets.get, presets.names())]
        if json:
            measured = {**asdict(here), "links": [asdict(link) for link in links]}
            typer.echo(json_text([measured, *map(asdict, elsewhere)]))
        else:
            console = output()
            console.print(presets.table(machines))
            console.print(presets.link_table(links))
