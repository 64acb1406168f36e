"""`shoal plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import shoal
from shoal import Plan
from shoal.app import flags
from shoal.app.cli.console import app, errors_reported, patch_grid, search_shown
from shoal.app.training.prepare import to_plan
from shoal.app.training.results import save_plan
from shoal.core.files import json_text
from shoal.core.hardware import Hardware
from shoal.core.lossy import DEFAULT_CODEC
from shoal.errors import BudgetError, InputError
from shoal.memory.budget import budget_bytes


@app.command()
def plan(
    ctx: typer.Context,
    model: flags.Network,
    budget: Annotated[
        str | None,
        typer.Option(help="Device bytes a step may use, such as 1GiB or 80%; by default all that --hardware has."),
    ] = None,
    batch: flags.Batch = 32,
    image: flags.Pixels = 224,
    hardware: flags.Preset = None,
    planner: flags.Planner = "joint",
    optimizer: flags.StateOf = "sgd-momentum",
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Also find the largest batch that fits, by planning.")
    ] = False,
    max_patch: Annotated[
        bool, typer.Option("--max-patch", help="Also find the largest patch that fits, sides about equal, by planning.")
    ] = False,
    codec: flags.Codec = DEFAULT_CODEC,
    allow: flags.Allow = None,
    kernels: flags.Kernels = "auto",
    split: flags.Split = None,
    grid: flags.Grid = "2x2",
    stochastic: flags.Stochastic = None,
    halo: flags.Halo = None,
    batch_norm: flags.BatchNorm = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json, plan.html and trace.json.")] = None,
) -> None:
    """Plan a step without running it, for this machine or for one that is not here.

    With --hardware the network takes no memory, whatever its size. With --max-batch or --max-patch a plan that does not
    fit still ends with exit code 2, after the batch or the patch that does.
    """
    with errors_reported(ctx):
        asked = to_plan(model, batch, image, hardware, batch_norm, out)
        target, network, shape = asked.target, asked.network, asked.shape
        within_bytes = _budget_bytes(budget, target)
        patches = None
        if split is not None:
            divided = shoal.split(network, split, patch_grid(grid), stochastic, halo=halo)  # type: ignore[arg-type]
            patches = divided.patch_map(shape[2:])
            network = divided
        figures: dict[str, Any] = {"model": model, "hardware": hardware, "budget_bytes": within_bytes}
        failure: BudgetError | None = None
        options: dict[str, Any] = {
            "hardware": target,
            "optimizer": None if optimizer == "none" else optimizer,
            "allow": allow,
            "options": flags.options(planner, kernels, codec),
            "name": model,
        }
        try:
            made = shoal.plan(network, asked.images(*shape), within_bytes, **options)
        except BudgetError as error:
            if not max_batch and not max_patch:
                raise
            failure = error
            figures |= {"planner": planner, "reason": str(error)}
        else:
            figures |= _figures(made)
            if not json:
                typer.echo("\n".join(filter(None, (asked.form, made.explain()))))
            for path in save_plan(made, out, patches) if out is not None else ():
                typer.echo(str(path), err=json)
        if max_batch:
            with search_shown("largest batch") as show:
                found = shoal.fit(
                    network,
                    lambda images: asked.images(images, *shape[1:]),
                    within_bytes,
                    first=batch,
                    trying=lambda images: show(f"{images} images"),
                    **options,
                )
            _show("batch", found, figures, json)
        if max_patch:
            with search_shown("largest patch") as show:
                found = shoal.fit(
                    network,
                    lambda sides: asked.images(*shape[:2], *sides),
                    within_bytes,
                    patch=shape[2:],
                    trying=lambda sides: show("x".join(map(str, sides))),
                    **options,
                )
            _show("patch", found, figures, json)
        if json:
            typer.echo(json_text(figures))
        if failure is not None:
            raise failure


def _show(what: str, found: Any, figures: dict[str, Any], json: bool) -> None:
    figures[f"max_{what}"] = found.to_json()
    if not json:
        typer.echo(f"largest {what}   {found}")


def _budget_bytes(budget: str | None, target: Hardware | None) -> int:
    found_bytes = budget_bytes(budget, torch.device("cpu") if target is None else target.device.memory_bytes)
    if found_bytes is not None:
        return found_bytes
    if target is None:
        raise InputError("no budget was given; say how many bytes a step may use, such as --budget 1GiB")
    return target.device.memory_bytes


def _figures(made: Plan) -> dict[str, Any]:
    return {
        "model": made.graph.model,
        "planner": made.planner,
        "hardware": made.hardware,
        "budget_bytes": made.budget_bytes,
        "predicted_peak_bytes": made.predicted_peak_bytes,
        "plain_peak_bytes": made.plain_peak_bytes,
        "predicted_seconds": made.predicted_seconds,
        "plain_seconds": made.plain_seconds,
        "lower_bound_seconds": made.least_added_seconds,
        "planning_seconds": made.planning_seconds,
        "kept_storages": len(made.kept),
        "kept_bytes": sum(storage.nbytes for storage in made.kept),
        "recomputed_storages": len(made.recomputed),
        "recomputed_bytes": sum(storage.nbytes for storage in made.recomputed),
        "offloaded_storages": len(made.offloaded),
        "host_bytes": made.host_bytes,
        "encoded_storages": len(made.encoded),
        "encoded_bytes": sum(storage.nbytes for storage in made.encoded),
        "payload_bytes": made.payload_bytes,
        "codec_seconds": made.codec_seconds,
        "encoding_errors": dict(made.errors),
        "stall_seconds": made.timeline.stall_seconds,
        "launch_wait_seconds": made.timeline.launch_wait_seconds,
        "variant": str(made.variant),
        "compiled": list(made.compiled),
        "candidates": [asdict(one) for one in made.candidates],
    }
