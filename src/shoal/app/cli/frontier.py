"""`shoal frontier`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

import shoal
from shoal.app import flags
from shoal.app.cli.console import app, errors_reported, output, search_shown
from shoal.app.training.prepare import to_plan
from shoal.core.files import json_text
from shoal.core.lossy import DEFAULT_CODEC
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.engine.frontier import BatchFrontier, Frontier


@app.command()
def frontier(
    ctx: typer.Context,
    model: flags.Network,
    budget: Annotated[
        str | None, typer.Option(help="Where you stand: device bytes a step may use, such as 1GiB or 80%.")
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Images per step; or auto: images per second by batch, inside --budget.")
    ] = "32",
    image: flags.Pixels = 224,
    points: Annotated[
        int, typer.Option(help="How many budgets, from the least that works to keeping all, or batches.")
    ] = 10,
    hardware: flags.Preset = None,
    planner: flags.Planner = "joint",
    optimizer: flags.StateOf = "sgd-momentum",
    codec: flags.Codec = DEFAULT_CODEC,
    allow: flags.Allow = None,
    kernels: flags.Kernels = "auto",
    batch_norm: flags.BatchNorm = None,
    json: Annotated[bool, typer.Option("--json", help="Print the frontier as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for frontier.html, frontier.svg and frontier.json.")] = None,
) -> None:
    """Step time against bytes: plan a step inside many budgets, without running it.

    With --batch auto images per second against batch: plan steps of many batches inside one budget, up to the largest
    that fits. With --hardware the network takes no memory, whatever its size.
    """
    with errors_reported(ctx):
        n_images = _images(batch, budget)
        asked = to_plan(model, 1 if n_images is None else n_images, image, hardware, batch_norm, out)

        def images(count: int) -> torch.Tensor:
            return asked.images(count, *asked.shape[1:])

        with search_shown("frontier") as trying:
            made: Frontier | BatchFrontier = shoal.frontier(
                asked.network,
                images if n_images is None else images(n_images),
                budget=budget,
                hardware=asked.target,
                allow=allow,
                optimizer=None if optimizer == "none" else optimizer,
                options=flags.options(planner, kernels, codec),
                points=points,
                name=model,
                trying=trying,
            )
        if json:
            typer.echo(json_text(made.to_json()))
        else:
            output().print(made.table())
        if out is not None:
            for path in (
                made.save_html(out / "frontier.html"),
                made.save_svg(out / "frontier.svg"),
                made.save(out / "frontier.json"),
            ):
                typer.echo(str(path), err=json)


def _images(batch: str, budget: str | None) -> int | None:
    """The number of --batch; None for auto.

    Raises:
        InputError: it is neither, or auto without --budget.
    """
    if batch.strip().lower() == "auto":
        if budget is None and not os.environ.get("SHOAL_BUDGET"):
            raise InputError("--batch auto needs a budget that all batches have to fit in, such as --budget 1GiB")
        return None
    if not batch.strip().isdecimal():
        raise InputError(f"--batch {batch}: expected a number of images, or auto")
    return int(batch)
