"""`shoal frontier`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import shoal
import shoal.app.models
from shoal import planners
from shoal.app.cli.console import app, errors, errors_reported, output
from shoal.app.training.batch_norm_form import in_form
from shoal.app.training.optimizers import optimizer_of
from shoal.app.training.results import check_writable
from shoal.core import presets


@app.command()
def frontier(
    model: Annotated[str, typer.Option(help="A network, such as resnet50.")],
    budget: Annotated[
        str | None, typer.Option(help="Where you stand: device bytes a step may use, such as 1GiB or 80%.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images per step.")] = 32,
    image: Annotated[int, typer.Option(help="Pixels along each side.")] = 224,
    points: Annotated[int, typer.Option(help="How many budgets, from the least that works to keeping all.")] = 10,
    hardware: Annotated[str | None, typer.Option(help="A preset of `shoal hardware`; none means this machine.")] = None,
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(planners.NAMES)}.")] = "joint",
    optimizer: Annotated[str, typer.Option(help="Optimizer whose state counts: sgd, adamw or none.")] = "sgd",
    lossy: Annotated[
        str | None, typer.Option(help="Let joint store convolution inputs in 8 bits: dynamic_tree, linear, ...")
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(help="Means that may be used: bitwise, exact (default), lossy, or names such as recompute,fuse."),
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="fused (or a level: rcf, mvf, bnff, icf), or inverted, with LeakyReLU for ReLU.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the frontier as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for frontier.html, frontier.svg and frontier.json.")] = None,
) -> None:
    """Step time against bytes: plan a step inside many budgets, without running it.

    With --hardware the network takes no memory, whatever its size.
    """
    with errors_reported():
        target = None if hardware is None else presets.get(hardware)
        shape = shoal.app.models.example_shape(model, batch, image)
        if out is not None:
            check_writable(out)
        with torch.device("cpu" if target is None else "meta"):
            network = in_form(shoal.app.models.build(model, seed=0), batch_norm)
            example = torch.empty(shape)
        with _search_shown() as trying:
            made = shoal.frontier(
                network,
                example,
                budget=budget,
                hardware=target,
                allow=allow,
                planner=planner,
                optimizer=None if optimizer == "none" else optimizer_of(optimizer, network),
                lossy=lossy,
                points=points,
                name=model,
                trying=trying,
            )
        if json:
            typer.echo(dumps(made.to_json(), indent=1))
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


@contextmanager
def _search_shown() -> Iterator[Callable[[str], object]]:
    """A line that shows what is done; nothing where stderr is not a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("frontier")
        yield lambda what: progress.update(task, description=f"frontier: {what}")
