"""The command line: parse, call, print.

Exit codes: 0 done, 2 an argument, a file, the data or the budget is wrong (one line says what and how to mend it),
3 out of memory, 130 interrupted with a checkpoint to resume from (143 after SIGTERM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import shoal
import shoal.models
from shoal import planners, presets
from shoal.codecs import samples, trial
from shoal.errors import BudgetError, InputError, ShoalError
from shoal.hardware import Hardware
from shoal.machine import device_of
from shoal.max_batch import largest_batches
from shoal.max_batch import table as max_batch_table
from shoal.measure import measure
from shoal.measure_links import measure_links
from shoal.plan import Plan
from shoal.sizes import format_bytes, parse_bytes
from shoal.steps_by_batch import StepsByBatch
from shoal.training import loop
from shoal.training.display import Display, outcome_table
from shoal.training.optimizers import optimizer_of
from shoal.training.options import TrainOptions
from shoal.training.results import check_writable, save_plan, save_results

_WRONG = 2
_OUT_OF_MEMORY = 3
_INTERRUPTED = 130

app = typer.Typer(
    help="Train convolutional networks inside a byte budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True)


def main() -> None:
    """What the console script `shoal` runs."""
    app()


@app.command()
def train(
    model: Annotated[str, typer.Option(help="A network, such as resnet18.")] = "resnet18",
    data: Annotated[str | None, typer.Option(help="A data set; by default digits, for U-Nets synthetic.")] = None,
    batch: Annotated[int, typer.Option(help="Images per step.")] = 128,
    budget: Annotated[str | None, typer.Option(help="Device bytes a step may use, such as 150MiB.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 3,
    enforce: Annotated[bool, typer.Option("--enforce", help="Let what passes the budget die.")] = False,
    arena: Annotated[bool, typer.Option("--arena", help="Serve each step from one block of memory.")] = False,
    planner: Annotated[
        str,
        typer.Option(
            help="joint, chain, sqrt, keep_all, hmms, hmms_recompute, layerwise, hascoet, or none for plain PyTorch."
        ),
    ] = "joint",
    offload_to: Annotated[
        str, typer.Option(help="Where saved tensors may wait: host, a folder, none, or auto for host on CUDA.")
    ] = "auto",
    host_budget: Annotated[
        str | None, typer.Option(help="Most bytes there, such as 8GiB; half of it by default.")
    ] = None,
    rehearse: Annotated[
        str | None, typer.Option(help="A preset of `shoal hardware`: copies take as long beside the CPU as there.")
    ] = None,
    lossy: Annotated[
        str | None, typer.Option(help="Let joint store convolution inputs in 8 bits: dynamic_tree, linear, ...")
    ] = None,
    split: Annotated[float | None, typer.Option(help="Share of the convolutions to split into patches.")] = None,
    grid: Annotated[str, typer.Option(help="Patches along each dimension.")] = "2x2",
    stochastic: Annotated[float | None, typer.Option(help="Draw the cuts anew in every step, by this omega.")] = None,
    halo: Annotated[str | None, typer.Option(help="exact: patches overlap, and the function stays the same.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write arguments and outcome to this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoint, report, plan, trace.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    lr: Annotated[float, typer.Option(help="Highest learning rate; it rises to it, then falls along a cosine.")] = 0.02,
    momentum: Annotated[float, typer.Option(help="SGD's momentum.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 5e-4,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    seed: Annotated[int, typer.Option(help="Of weights, order, augmentation and dropout.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that load images.")] = 0,
    image: Annotated[int | None, typer.Option(help="Pixels along each side.")] = None,
    inner: Annotated[str, typer.Option(help="What runs the planned graphs: eager or inductor.")] = "eager",
    amp: Annotated[str, typer.Option(help="Autocast: bf16, fp16 or none.")] = "none",
    channels_last: Annotated[
        bool, typer.Option("--channels-last/--contiguous", help="How images lie in memory.")
    ] = True,
    root: Annotated[str | None, typer.Option(help="Where the data set lies.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Train a network inside a budget.

    With --enforce and --planner none, plain PyTorch meets the same wall: it is expected to run out of memory, with exit
    code 3. Wrong arguments end with exit code 2. Ctrl-C finishes the step, writes a checkpoint and ends with exit code
    130; --resume then continues bit for bit. With --arena each allocation of a step has its place in one block: faster
    where malloc maps and unmaps large tensors in every step.
    """
    with _told_plainly():
        data = data or ("synthetic" if model.startswith("unet") else "digits")
        options = TrainOptions(
            model=model,
            data=data,
            batch=batch,
            budget_bytes=None if budget is None else parse_bytes(budget),
            planner=planner,
            epochs=epochs,
            enforce=enforce,
            arena=arena,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            optimizer=optimizer,
            seed=seed,
            workers=workers,
            image=image,
            inner=inner,
            amp=amp,
            channels_last=channels_last,
            root=root,
            device=device,
            split=split,
            grid=_grid(grid),
            stochastic=stochastic,
            halo=halo,
            offload_to=None if offload_to == "none" else offload_to,
            host_budget_bytes=None if host_budget is None else parse_bytes(host_budget, "host_budget"),
            rehearse=rehearse,
            lossy=lossy,
            out=out if out is not None else Path("runs") / f"{model}-{data}",
            resume=resume,
        )
        code = _train(options, json)
    raise typer.Exit(code)


def _train(options: TrainOptions, json: Path | None) -> int:
    shoal.models.example_shape(options.model, options.batch, 64)  # an unknown network is told before folders are made
    if json is not None:
        check_writable(json.absolute().parent)
    console = Console()
    try:
        with Display(console, options) as display:
            outcome = loop.train(options, display)
    except torch.OutOfMemoryError as error:
        _tell(_out_of_memory(options, str(error)))
        return _OUT_OF_MEMORY
    console.print(outcome_table(options, outcome))
    page = save_results(options, outcome, json)
    if page is not None:
        console.print(f"report      {page}", highlight=False, soft_wrap=True)
    console.print(f"checkpoint  {outcome.checkpoint}", highlight=False, soft_wrap=True)
    if outcome.signal:
        _tell(f"interrupted; {outcome.checkpoint} holds the run: the same command with --resume continues it")
        return 128 + outcome.signal
    return 0


def _out_of_memory(options: TrainOptions, reason: str) -> str:
    reason = reason.strip().splitlines()[0].removeprefix("out of memory: ")
    who = "plain PyTorch" if options.planner == "none" else f"the plan of {options.planner}"
    where = (
        f"the wall of {format_bytes(options.budget_bytes)}"
        if options.enforce and options.budget_bytes
        else "the device's memory"
    )
    hint = "let Shoal plan the step" if options.planner == "none" else "give a larger budget"
    return f"out of memory: {who} does not fit {where} ({reason}); {hint}"


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A network, such as resnet50.")],
    budget: Annotated[
        str | None, typer.Option(help="Device bytes a step may use, such as 1GiB; by default all that --hardware has.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images per step.")] = 32,
    image: Annotated[int, typer.Option(help="Pixels along each side.")] = 224,
    hardware: Annotated[str | None, typer.Option(help="A preset of `shoal hardware`; none means this machine.")] = None,
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(planners.NAMES)}.")] = "joint",
    optimizer: Annotated[str, typer.Option(help="Whose state counts: sgd, adamw or none.")] = "sgd",
    max_batch: Annotated[
        bool, typer.Option("--max-batch", help="Also find the largest batch that fits, with each planner.")
    ] = False,
    lossy: Annotated[
        str | None, typer.Option(help="Let joint store convolution inputs in 8 bits: dynamic_tree, linear, ...")
    ] = None,
    split: Annotated[float | None, typer.Option(help="Share of the convolutions to split into patches.")] = None,
    grid: Annotated[str, typer.Option(help="Patches along each dimension.")] = "2x2",
    stochastic: Annotated[float | None, typer.Option(help="Plan for cuts drawn in every step, by this omega.")] = None,
    halo: Annotated[str | None, typer.Option(help="exact: patches overlap, and the function stays the same.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print figures as JSON instead of a text.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json, plan.html and trace.json.")] = None,
) -> None:
    """Plan a step without running it, for this machine or for one that is not here.

    With --hardware the network takes no memory, whatever its size. With --max-batch a plan that does not fit still
    ends with exit code 2, after the batches that do.
    """
    with _told_plainly():
        target = None if hardware is None else presets.get(hardware)
        budget_bytes = _budget_bytes(budget, target)
        shape = shoal.models.example_shape(model, batch, image)
        if out is not None:
            check_writable(out)
        if max_batch and target is None:
            raise InputError("--max-batch plans many steps, for a device that is not here: name it with --hardware")
        with torch.device("cpu" if target is None else "meta"):
            network = shoal.models.build(model, seed=0)
            example = torch.empty(shape)
        patches = None
        if split is not None:
            divided = shoal.split(network, split, _grid(grid), stochastic, halo=halo)  # type: ignore[arg-type]
            patches = divided.patch_map(shape[2:])
            network = divided
        elif halo is not None or stochastic is not None:
            raise InputError("nothing is split; give --split too, such as --split 0.5")
        owner = None if optimizer == "none" else optimizer_of(optimizer, network)
        figures: dict[str, Any] = {"model": model, "hardware": hardware, "budget_bytes": budget_bytes}
        failure: BudgetError | None = None
        try:
            made = shoal.plan(
                network,
                example,
                budget=budget_bytes,
                hardware=target,
                planner=planner,
                optimizer=owner,
                lossy=lossy,
                name=model,
            )
        except BudgetError as error:
            if not max_batch:
                raise
            failure = error
            figures |= {"planner": planner, "reason": str(error)}
        else:
            figures |= _figures(made)
            if not json:
                typer.echo(made.explain())
            for path in save_plan(made, out, patches) if out is not None else ():
                typer.echo(str(path), err=json)
        if target is not None and max_batch:

            def shape_of(images: int) -> tuple[int, ...]:
                return shoal.models.example_shape(model, images, image)

            steps = StepsByBatch(network, shape_of, target, optimizer=owner, name=model)
            with _search_shown() as trying:
                answers = largest_batches(steps, target, budget_bytes, first=batch, trying=trying)
            figures["max_batch"] = [answer.to_json() for answer in answers]
            if not json:
                _printing().print(max_batch_table(answers))
        if json:
            typer.echo(dumps(figures, indent=1))
        if failure is not None:
            raise failure


def _grid(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.strip().isdigit() for part in parts):
        raise InputError(f"--grid {text}: expected numbers of patches with an x in between, such as 2x2")
    return tuple(int(part) for part in parts)


def _budget_bytes(budget: str | None, target: Hardware | None) -> int:
    if budget is not None:
        return parse_bytes(budget)
    if target is None:
        raise InputError("no budget was given; say how many bytes a step may use, such as --budget 1GiB")
    return target.device.memory_bytes


@contextmanager
def _search_shown() -> Iterator[Callable[[str, int], None]]:
    """A line that tells what is being tried; nothing where nobody watches."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_errors, transient=True, disable=not _errors.is_terminal) as progress:
        task = progress.add_task("largest batch")
        yield lambda planner, batch: progress.update(task, description=f"largest batch: {planner}, {batch} images")


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
        "lower_bound_seconds": made.lower_bound_seconds,
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
    }


@app.command()
def hardware(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    folder: Annotated[
        str | None, typer.Option(help="Where the CPU's offload to a file is measured; by default the system's /tmp.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show this machine, measured in seconds the first time, and those that can be planned for from afar."""
    with _told_plainly():
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        links = measure_links(device, folder=folder)
        here, *elsewhere = machines = [measure(device), *map(presets.get, presets.names())]
        if json:
            measured = {**asdict(here), "links": [asdict(link) for link in links]}
            typer.echo(dumps([measured, *map(asdict, elsewhere)], indent=1))
        else:
            console = _printing()
            console.print(presets.table(machines))
            console.print(presets.link_table(links))


@app.command()
def codecs(
    file: Annotated[Path | None, typer.Argument(help="An array in .npy, tensors in .pt, or raw float32.")] = None,
    distribution: Annotated[
        str | None, typer.Option(help=f"Draw numbers instead: {', '.join(samples.DISTRIBUTIONS)}.")
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
    with _told_plainly():
        if file is not None and distribution is not None:
            raise InputError(f"got both {file} and --distribution {distribution}; give one of them")
        chosen = [trial.of_values(shoal.codecs.get(name)) for name in codec or trial.tryable_names()]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = device_of(device)
        if file is None:
            name = distribution or "normal"
            values = samples.drawn(name, samples.DRAWN_ELEMS if elements is None else elements)
        else:
            name, values = str(file), samples.read(file, elements)
        tried = [trial.try_codec(each, values.to(place)) for each in chosen]
        if json:
            rows = [each.to_json() for each in tried]
            where = {"source": name, "elements": values.numel(), "device": device, "threads": torch.get_num_threads()}
            typer.echo(dumps({**where, "codecs": rows}, indent=1))
        else:
            _printing().print(trial.columns(tried, f"{name}: {values.numel():,} float32 on {device}"))


def _printing() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 240  # a file has room for a whole row
    return console


@contextmanager
def _told_plainly() -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 2."""
    try:
        yield
    except ShoalError as error:
        _tell(str(error))
        raise typer.Exit(_WRONG) from None
    except KeyboardInterrupt:
        _tell("interrupted at once; what was done since the last checkpoint is lost")
        raise typer.Exit(_INTERRUPTED) from None


def _tell(message: str) -> None:
    _errors.print(f"[bold red]shoal:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
