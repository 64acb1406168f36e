"""The frame of every benchmark: its arguments, conditions, progress, JSON file, `--resume` and exit code.

A benchmark is a function of a `Run`, made a command by `main = Bench(run, ...)`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.conditions import conditions, describe, file_name
from shoal.core.files import write_json
from shoal.cost import measurement_cache
from shoal.errors import CodecError, InputError

T = TypeVar("T")


class WrongResult(Exception):
    """A contender computed, trained or counted something else than it must: exit code 1."""


class Unavailable(Exception):
    """The benchmark cannot run on this machine: exit code 3."""


@dataclass(frozen=True)
class Option:
    """One argument of a command line; see `option`."""

    flag: str
    known: Collection[str] | None
    minimum: int | None
    settings: Mapping[str, Any]

    def check(self, asked: argparse.Namespace) -> None:
        """
        Raises:
            InputError: the value is below the minimum, or is an unknown name.
        """
        value = getattr(asked, self.flag.lstrip("-").replace("-", "_"))
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if self.minimum is not None and any(isinstance(n, int) and n < self.minimum for n in numbers):
            raise InputError(f"{self.flag} {','.join(map(str, numbers))}: give {self.minimum} or more")
        if self.known is not None and value is not None:
            some_of(self.flag, value, self.known)


def option(flag: str, *, known: Collection[str] | None = None, minimum: int | None = 1, **settings: Any) -> Option:
    """An argument: `argparse`'s settings, and what is checked of its value.

    Args:
        flag: such as `--rounds`.
        known: the names that a list may hold; the type is then a comma-separated list.
        minimum: of an integer, or of each in a list; None: any.
        settings: for `ArgumentParser.add_argument`.
    """
    if known is not None:
        settings = {"type": comma_separated, "help": f"of {', '.join(known)}", **settings}
    return Option(flag, known, minimum, settings)


def switch(flag: str, meaning: str) -> Option:
    """An argument that is there or not."""
    return Option(flag, None, None, {"action": "store_true", "help": meaning})


@dataclass
class Run:
    """One run of a benchmark.

    Attributes:
        name: of the benchmark.
        asked: the parsed arguments.
        device: what `--device` names; the CPU without it.
        conditions: of this machine and process.
        out, path: the folder of the results, and the JSON file that `save` writes.
        console: what `say` prints on.
        result: what `save` writes.
        saved: whether it has; the frame then says where.
        skipped: what `skip` was called with.
    """

    name: str
    asked: argparse.Namespace
    device: torch.device
    conditions: dict[str, Any]
    out: Path
    path: Path
    console: Console
    result: dict[str, Any] = field(default_factory=dict)
    saved: bool = False
    skipped: dict[str, str] = field(default_factory=dict)

    def pick(self, usual: T, quick: T) -> T:
        """`quick` where `--quick` was given."""
        return quick if self.asked.quick else usual

    @property
    def clock(self) -> Callable[[], float]:
        """This thread's CPU time with `--cpu-time`, else the wall clock."""
        return time.thread_time if self.asked.cpu_time else time.perf_counter

    def chosen(self, usual: Mapping[str, T], quick: Mapping[str, T]) -> dict[str, T]:
        """The settings of the networks that `--networks` names; of all without it.

        Raises:
            InputError: one has none.
        """
        settings = self.pick(usual, quick)
        return {name: settings[name] for name in some_of("--networks", self.asked.networks or list(settings), settings)}

    def say(self, *what: RenderableType) -> None:
        """Print lines as they are, and tables."""
        for one in what:
            self.console.print(one, highlight=False, markup=False)

    def skip(self, name: str, reason: object) -> None:
        """Say that something is not measured here, and why: a library is missing."""
        self.skipped[name] = str(reason)
        self.say(f"{name}: skipped, {reason}")

    def reject_nothing(self, measured: Collection[Any]) -> None:
        """Whether anything was measured.

        Raises:
            Unavailable: all was skipped; with the reasons.
        """
        if not measured and self.skipped:
            raise Unavailable(f"nothing was measured: {'; '.join(dict.fromkeys(self.skipped.values()))}")

    def save(self, **figures: Any) -> None:
        """Add figures to the result and write it."""
        self.result.update(figures)
        write_json(self.path, self.result)
        self.saved = True

    def resume(self, *parts: str, pace: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What an earlier run wrote into the file that `--resume` names; nothing without it.

        Args:
            parts: what the file must hold.
            pace: what its `pace` must equal.

        Raises:
            InputError: the file cannot be read, lacks a part, or its runs had another pace.
        """
        path = self.asked.resume
        if path is None:
            return {}
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            for part in (*parts, *(["pace"] if pace is not None else [])):
                found[part]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"--resume {path}: {error}; give a file that bench.{self.name} wrote") from error
        if pace is not None and found["pace"] != (ours := json.loads(json.dumps(dict(pace)))):
            theirs = found["pace"]
            raise InputError(
                f"--resume {path}: its runs had {theirs}, these have {ours}; ask for the same, or run anew"
            )
        return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


class Bench:
    """The command line of a benchmark.

    Args:
        run: measures, prints and saves; what it returns is the exit code, None for 0. Its module's docstring is the
            help, its file the benchmark's name.
        options: beside `--out` and what follows.
        quick: the help of `--quick`; None: there is none.
        resume: the help of `--resume FILE`; None: there is none.
        device, seed: whether there are `--device` and `--seed`.
        header: whether the conditions are printed before `run`.
        out: default of `--out`.
    """

    def __init__(
        self,
        run: Callable[[Run], int | None],
        *options: Option,
        quick: str | None = "small: does it run?",
        resume: str | None = None,
        device: bool = False,
        seed: bool = False,
        header: bool = True,
        out: str = "runs/bench",
    ) -> None:
        own = [switch("--quick", quick)] if quick else []
        own += options
        own += [option("--resume", type=Path, metavar="FILE", help=resume)] if resume else []
        own += [option("--device", default="cpu", help="cpu or cuda")] if device else []
        own += [option("--seed", type=int, default=0, minimum=None)] if seed else []
        own += [option("--out", type=Path, default=Path(out), help="folder for the results")]
        self._run, self._options, self._header = run, own, header
        self.name = Path(run.__code__.co_filename).stem

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The arguments, each checked.

        Raises:
            InputError: one is out of its range, or is an unknown name.
        """
        parser = _Parser(
            prog=f"python -m bench.{self.name}",
            description=self._run.__globals__["__doc__"],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for one in self._options:
            parser.add_argument(one.flag, **one.settings)
        asked = parser.parse_args(arguments)
        for one in self._options:
            one.check(asked)
        return asked

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run it; 0, or 1 for a wrong result, 2 for a wrong argument, 3 where it cannot run on this machine."""
        try:
            asked = self.parse(arguments)
            count = getattr(asked, "threads", None)
            with threads(count if isinstance(count, int) else None):
                run = self._begin(asked)
                code = self._run(run) or 0
            if run.saved:
                run.say(f"Figures in {run.path}")
            return code
        except (InputError, CodecError, WrongResult, Unavailable) as error:
            print(f"bench.{self.name}: {error}", file=sys.stderr)
            return 1 if isinstance(error, WrongResult) else 3 if isinstance(error, Unavailable) else 2

    def _begin(self, asked: argparse.Namespace) -> Run:
        device = measurement_cache.device_of(getattr(asked, "device", "cpu"))
        if getattr(asked, "cpu_time", False) and (torch.get_num_threads() > 1 or device.type != "cpu"):
            raise InputError("--cpu-time counts one CPU thread's time: give one thread and no other device")
        out = make_folder(asked.out)
        found = conditions(device, getattr(asked, "seed", 0))
        path = out / file_name(self.name, device)
        run = Run(self.name, asked, device, found, out, path, make_console(), {"conditions": found})
        if self._header:
            run.say(describe(found))
        return run


def comma_separated(text: str) -> list[str]:
    """The names in `text`.

    >>> comma_separated("unet, unet3d")
    ['unet', 'unet3d']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


NETWORKS = option("--networks", type=comma_separated, help="comma-separated; by default all")
CPU_TIME = switch("--cpu-time", "CPU time of the one thread: for a machine that others use too")


def integers(text: str) -> list[int]:
    """The whole numbers in `text`.

    >>> integers("2,4")
    [2, 4]
    """
    try:
        return [int(one) for one in comma_separated(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers, as in 2,4") from None


def percentages(text: str) -> list[float]:
    """The shares in `text`.

    >>> percentages("66,40")
    [66.0, 40.0]
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected percentages such as 66,40") from None
    if not all(0 < share <= 100 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r}: a budget is above 0 and at most 100 % of the peak")
    return shares


def some_of(flag: str, names: Sequence[str], known: Collection[str]) -> Sequence[str]:
    """`names`, each of which is known.

    Raises:
        InputError: one is not, or there are none.
    """
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InputError(f"{flag} {','.join(unknown or ['nothing'])}: give some of {', '.join(known)}")
    return names


def make_folder(path: Path) -> Path:
    """The folder `path`, made where it is not there yet."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}; give another with --out") from error
    return path


def make_console() -> Console:
    """To stdout: as wide as it is on a terminal; plain text, wide enough for every column, where it is piped."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=200, no_color=True)


def use_exact_kernels() -> None:
    """No TF32, and the same kernels every time, where there is a GPU."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """PyTorch's threads inside the block; None: as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Show(Protocol):
    """Say what runs; `steps` of the whole are done since the last call."""

    def __call__(self, subject: str, what: str, steps: int = 0) -> None: ...


@contextmanager
def bar(total: int) -> Iterator[Show]:
    """A bar over `total` things on stderr, with what runs now; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def show(subject: str, what: str, steps: int = 0) -> None:
            progress.update(task, description=f"{subject}: {what}", advance=steps)

        yield show
