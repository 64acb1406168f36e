"""`shoal train`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from rich.console import Console

import shoal.app.models
from shoal.app import flags
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
from shoal.app.training.display import Display
from shoal.app.training.options import TrainOptions
from shoal.app.training.prepare import device as device_called
from shoal.app.training.ranks import Ranks, joined, rank_of_torchrun
from shoal.app.training.results import check_writable, run_folder, save_results
from shoal.core.sizes import format_bytes, parse_bytes
from shoal.errors import InputError, ShoalError
from shoal.memory.budget import budget_bytes


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each field of `TrainOptions` that has one, passed to its `**options`."""
    hints = get_type_hints(TrainOptions, include_extras=True)
    flags = {each.name: each.default for each in fields(TrainOptions) if get_origin(hints[each.name]) is Annotated}
    *own, _ = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [
        *own,
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in flags.items()
        ),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@app.command()
@with_options
def train(
    ctx: typer.Context,
    *,
    budget: Annotated[str | None, typer.Option(help="Device bytes a step may use, such as 150MiB or 80%.")] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Bytes that offloading may use, such as 8GiB; half of what is free by default.")
    ] = None,
    grid: flags.Grid = "2x2",
    adaptive_precision: Annotated[
        bool, typer.Option("--adaptive-precision", help="Adapt the bits of each layer while training (AWP).")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write arguments and outcome to this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoint, report, plan, trace.")] = None,
    timeout: Annotated[float, typer.Option(help="Under torchrun: seconds that one rank waits for another.")] = 600.0,
    **options: Any,
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
        if adaptive_precision:
            if options["precision"] is not None:
                raise InputError(
                    f"--adaptive-precision chooses what --precision {options['precision']} fixes; give one of them"
                )
            options["precision"] = "adaptive"
        for name in ("offload_to", "compress_gradients"):
            if options[name] == "none":
                options[name] = None
        model, data, device = options["model"], options["data"], options["device"]
        chosen = TrainOptions(
            **options,
            budget_bytes=budget_bytes(budget, device_called(device), of_environment=options["planner"] != "none"),
            grid=patch_grid(grid),
            host_budget_bytes=None if host_budget is None else parse_bytes(host_budget, "host_budget"),
            out=out or Path("runs") / "-".join(each.rpartition(":")[2] for each in (model, data)),
        )
        shoal.app.models.find(model)  # an unknown network is reported before folders are made
        with joined(device, timeout) as ranks:
            code = _train(chosen, json, ranks, ctx)
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
            display.ended(outcome)
            if outcome.travel and (options.compress_gradients or options.weights or options.parallel):
                display.say(outcome.travel)
            page = save_results(options, outcome, json)
            if page is not None:
                display.say(f"report      {page}")
            if outcome.checkpoint.is_file():
                display.say(f"checkpoint  {outcome.checkpoint}")
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
