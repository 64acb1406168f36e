"""`shoal codecs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import shoal.codecs
from shoal.app.cli import codec_samples, codec_trial
from shoal.app.cli.console import app, errors_reported, output
from shoal.core.files import json_text
from shoal.cost.measurement_cache import device_of
from shoal.errors import InputError
from shoal.lowlevel import cuda_calls


@app.command()
def codecs(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="An array in .npy, tensors in .pt, or raw float32.")] = None,
    distribution: Annotated[
        str | None, typer.Option(help=f"Draw numbers instead: {', '.join(codec_samples.DISTRIBUTIONS)}.")
    ] = None,
    elements: Annotated[
        int | None, typer.Option(help="How many to draw (by default 1048576), or to take from the file.")
    ] = None,
    codec: Annotated[list[str] | None, typer.Option(help="Only this one; may be given again.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what each codec makes of some numbers on this machine: bytes, error, speed.

    GB/s are of float32 that is encoded, or made by decoding. A link faster than the break-even bandwidth carries the
    numbers as they are in less time than it takes to encode and decode them.
    """
    with errors_reported(ctx):
        if file is not None and distribution is not None:
            raise InputError(f"got both {file} and --distribution {distribution}; give one of them")
        chosen = [codec_trial.of_values(shoal.codecs.get(name)) for name in codec or codec_trial.tryable_names()]
        if device == "auto":
            device = "cuda" if cuda_calls.is_available() else "cpu"
        place = device_of(device)
        if file is None:
            name = distribution or "normal"
            values = codec_samples.drawn(name, codec_samples.DRAWN_ELEMS if elements is None else elements)
        else:
            name, values = str(file), codec_samples.read(file, elements)
        tried = [codec_trial.try_codec(each, values.to(place)) for each in chosen]
        if json:
            rows = [each.to_json() for each in tried]
            where = {"source": name, "elements": values.numel(), "device": device, "threads": torch.get_num_threads()}
            typer.echo(json_text({**where, "codecs": rows}))
        else:
            output().print(codec_trial.columns(tried, f"{name}: {values.numel():,} float32 on {device}"))
