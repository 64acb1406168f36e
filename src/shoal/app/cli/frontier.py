"""`shoal frontier`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

import shoal
import shoal.app.models
from shoal.app import flags
from shoal.app.cli.console import app, errors_reported, output, search_shown
from shoal.app.training.batch_norm_form import in_form
from shoal.app.training.prepare import check_in_memory
from shoal.app.training.results import check_writable
from shoal.core import presets
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
        target = None if hardware is None else presets.get(hardware)
        n_images = _images(batch, budget)
        with torch.device("cpu" if target is None else "meta"):
            network = in_form(shoal.app.models.build(model, seed=0), batch_norm)
        shape = shoal.app.models.example_shape(network, 1 if n_images is None else n_images, image)
        if target is None:
            check_in_memory(shape, torch.device("cpu"))
        if out is not None:
            check_writable(out)
        example = torch.empty(shape, device="cpu" if target is None else "meta")

        def images(count: int) -> torch.Tensor:
            return torch.empty((count, *shape[1:]), device=example.device)

        with search_shown("frontier") as trying:
            made: Frontier | BatchFrontier = shoal.frontier(
                network,
                images if n_images is None else example,
                budget=budget,
                hardware=target,
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
            out.mkdir(parents=True, exist_ok=True)
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
