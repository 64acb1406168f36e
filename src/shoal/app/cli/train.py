"""`shoal train`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import shoal.app.models
from shoal import planners
from shoal.app.cli import flags
from shoal.app.cli.console import (
    DIVERGED,
    OUT_OF_MEMORY,
    WRONG,
    app,
    errors_reported,
    is_out_of_memory,
    patch_grid,
    report_error,
)
from shoal.app.training.display import Display, outcome_table
from shoal.app.training.options import TrainOptions
from shoal.app.training.prepare import device as device_called
from shoal.app.training.ranks import Ranks, joined, rank_of_torchrun
from shoal.app.training.results import check_writable, run_folder, save_results
from shoal.core.lossy import DEFAULT_CODEC
from shoal.core.sizes import format_bytes, parse_bytes
from shoal.errors import InputError, ShoalError
from shoal.memory.budget import budget_bytes


@app.command()
def train(
    ctx: typer.Context,
    model: flags.Network = "resnet18",
    data: Annotated[str, typer.Option(help="digits, image_folder, or FILE.py:FUNCTION.")] = "digits",
    batch: Annotated[int, typer.Option(help="Images per step, over all ranks.")] = 128,
    budget: Annotated[str | None, typer.Option(help="Device bytes a step may use, such as 150MiB or 80%.")] = None,
    budget_of: Annotated[
        str, typer.Option(help="What it bounds: allocated bytes, or those that CUDA's allocator has reserved.")
    ] = "allocated",
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 3,
    enforce: Annotated[bool, typer.Option("--enforce", help="Raise OutOfMemoryError above the budget.")] = False,
    planner: Annotated[
        str, typer.Option(help=f"{', '.join(planners.NAMES)}, MODULE:FUNCTION, or none for plain PyTorch.")
    ] = "joint",
    offload_to: Annotated[
        str, typer.Option(help="Where saved tensors may be offloaded: host, a folder, none, or auto for host on CUDA.")
    ] = "auto",
    host_budget: Annotated[
        str | None, typer.Option(help="Bytes that offloading may use, such as 8GiB; half of what is free by default.")
    ] = None,
    rehearse: Annotated[
        str | None, typer.Option(help="A preset of `shoal hardware`, whose link copies on the CPU imitate.")
    ] = None,
    codec: flags.Codec = DEFAULT_CODEC,
    allow: flags.Allow = None,
    split: flags.Split = None,
    grid: flags.Grid = "2x2",
    stochastic: flags.Stochastic = None,
    halo: flags.Halo = None,
    batch_norm: flags.BatchNorm = None,
    json: Annotated[Path | None, typer.Option(help="Write arguments and outcome to this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoint, report, plan, trace.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")] = False,
    lr: Annotated[float, typer.Option(help="Highest learning rate, between warm-up and cosine decay.")] = 0.02,
    momentum: Annotated[float, typer.Option(help="SGD's momentum.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 5e-4,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    seed: Annotated[int, typer.Option(help="Seed of weights, order, augmentation and dropout.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that load images.")] = 0,
    image: Annotated[int | None, typer.Option(help="Pixels along each side.")] = None,
    kernels: Annotated[
        str, typer.Option("--kernels", help="What runs the planned step: eager, compiled or auto.")
    ] = "auto",
    amp: Annotated[str, typer.Option(help="Autocast: bf16, fp16 or none.")] = "none",
    channels_last: Annotated[
        bool, typer.Option("--channels-last/--contiguous", help="Memory format of images and weights.")
    ] = True,
    root: Annotated[str | None, typer.Option(help="Folder of the data set.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    compress_gradients: Annotated[
        str, typer.Option(help="Under torchrun: codec of gradients, such as dynamic_tree; auto measures which pays.")
    ] = "none",
    weights: Annotated[
        str | None, typer.Option(help="host: keep weights and optimizer in host memory; sharded: a shard on each rank.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision in which --weights are sent: 8, 16, 24 or 32 bits, or bf16.")
    ] = None,
    adaptive_precision: Annotated[
        bool, typer.Option("--adaptive-precision", help="Adapt the bits of each layer while training (AWP).")
    ] = False,
    one_byte: Annotated[
        str | None,
        typer.Option(help="Codec of weights in 8 bits, such as dynamic_tree; by default a float's top byte."),
    ] = None,
    awp_threshold: Annotated[
        float | None, typer.Option(help="AWP's T: how fast a norm must fall for more bits; -0.002 by default.")
    ] = None,
    awp_interval: Annotated[int | None, typer.Option(help="AWP's INTERVAL in batches; an epoch by default.")] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: a strategy of your own, as MODULE:CLASS.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Under torchrun: seconds that one rank waits for another.")] = 600.0,
) -> None:
    """Train a network inside a budget.

    With --enforce and --planner none, plain PyTorch has the same memory limit: it should run out of memory, with exit
    code 3. Wrong arguments end with exit code 2. Ctrl-C finishes the step, writes a checkpoint and ends with exit
    code 130; --resume then continues bit for bit. If a loss, or a weight that is to be saved, is not finite, training
    stops with exit code 4 and the last checkpoint stays as it is.

    Under torchrun every rank trains on its share of each batch, inside a budget of its own. Rank 0 shows the run and
    writes its files; a signal to one rank ends all after the same step, and an error on one names its rank.
    """
    with errors_reported(ctx, quiet=rank_of_torchrun() != 0):
        if adaptive_precision and precision is not None:
            raise InputError(f"--adaptive-precision chooses what --precision {precision} fixes; give one of them")
        as_typed = {each.name: ctx.params[each.name] for each in fields(TrainOptions) if each.name in ctx.params}
        in_other_words: dict[str, Any] = {
            "budget_bytes": budget_bytes(budget, device_called(device), of_environment=planner != "none"),
            "grid": patch_grid(grid),
            "offload_to": None if offload_to == "none" else offload_to,
            "host_budget_bytes": None if host_budget is None else parse_bytes(host_budget, "host_budget"),
            "compress_gradients": None if compress_gradients == "none" else compress_gradients,
            "precision": "adaptive" if adaptive_precision else precision,
            "out": out or Path("runs") / "-".join(each.rpartition(":")[2] for each in (model, data)),
        }
        options = TrainOptions(**(as_typed | in_other_words))
        shoal.app.models.find(model)  # an unknown network is reported before folders are made
        with joined(device, timeout) as ranks:
            code = _train(options, json, ranks, ctx)
    raise typer.Exit(code)


def _train(options: TrainOptions, json: Path | None, ranks: Ranks, ctx: typer.Context | None = None) -> int:
    try:
        return _train_and_show(replace(options, ranks=ranks.several), json, ranks)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        code, message = OUT_OF_MEMORY, _out_of_memory(options, str(error))
    except ShoalError as error:
        if ranks.count == 1:
            raise
        code, message = WRONG, str(error)
    if ranks.fails_first():
        report_error(message if ranks.count == 1 else f"rank {ranks.rank}: {message}", ctx)
    return code


def _train_and_show(options: TrainOptions, json: Path | None, ranks: Ranks) -> int:
    from shoal.app.training import loop  # and with it Dynamo, two seconds that `shoal --help` does not need

    if json is not None and ranks.first:
        check_writable(json.absolute().parent)
    with run_folder(options.out) if ranks.first else nullcontext():
        console = Console(emoji=False) if ranks.first else Console(quiet=True, force_terminal=False)
        with Display(console, options) as display:
            outcome = loop.train(options, display, ranks)
        if ranks.first:
            console.print(outcome_table(options, outcome))
            if outcome.travel and (options.compress_gradients or options.weights or options.parallel):
                console.print(outcome.travel, highlight=False, markup=False, soft_wrap=True)
            page = save_results(options, outcome, json)
            if page is not None:
                console.print(f"report      {page}", highlight=False, soft_wrap=True)
            if outcome.checkpoint.is_file():
                console.print(f"checkpoint  {outcome.checkpoint}", highlight=False, soft_wrap=True)
            if outcome.diverged:
                report_error(
                    f"training stopped: {outcome.diverged}; give a lower --lr than {options.lr:g}, or check the data"
                )
            if outcome.signal:
                report_error(
                    f"interrupted; {outcome.checkpoint} holds the run: the same command with --resume continues it"
                )
    if outcome.diverged:
        return DIVERGED
    return 128 + outcome.signal if outcome.signal else 0


def _out_of_memory(options: TrainOptions, reason: str) -> str:
    reason = (reason.strip() or "no more can be allocated").splitlines()[0].removeprefix("out of memory: ")
    who = "plain PyTorch" if options.planner == "none" else f"the plan of {options.planner}"
    where = (
        f"a memory limit of {format_bytes(options.budget_bytes)}"
        if options.enforce and options.budget_bytes
        else "the device's memory"
    )
    hint = "let Shoal plan the step" if options.planner == "none" else "give a larger budget"
    return f"out of memory: {who} does not fit {where} ({reason}); {hint}"
