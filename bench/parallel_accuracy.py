"""Test error of data and of model parallel training whose gradients, or activations, travel in 8 bits and in 32.

    python -m bench.parallel_accuracy                  2 and 4 ranks, 3 seeds, CIFAR-10
    python -m bench.parallel_accuracy --quick          digits, one seed, a few steps: does it run?
    python -m bench.parallel_accuracy --ranks 2 --how model    in pieces; --resume FILE continues

Dettmers 2016, section 3.4: a network of two convolutions, two locally connected layers and one linear layer, narrower
than the paper's. *Data parallel*: all of it under DistributedDataParallel, gradients through `compress_gradients`.
*Model parallel*: convolutions data parallel in 32 bits, local and linear layers shared out by `hybrid`, activations
and activation gradients of them encoded. Ranks are real processes joined by gloo; a batch is divided among them, so
that all runs of a seed see the same images in the same order. The F test asks, as the paper does, whether the means of
all types and of 32 bits differ by more than seeds do. At the end of every run each parameter that all ranks hold whole
must have the same bits on all of them.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from bench.frame import Bench, Run, WrongResult, integers, option
from bench.processes import Stage, Worker
from bench.split_accuracy import PACE_OPTIONS, paced
from bench.split_accuracy import images_of as cifar10_images
from bench.tables import new_table
from examples.parallel.hybrid import hybrid
from examples.parallel.local_convolution import LocalConv2d
from shoal.app.data.digits import open_digits
from shoal.distributed.gradients.compress_gradients import compress_gradients

EXACT = "32 bits"
TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")
DATA, MODEL = "data parallel", "model parallel"
HOW = {"data": (DATA,), "model": (MODEL,), "both": (DATA, MODEL)}
CODECS = {DATA: (EXACT, *TYPES, "one_bit"), MODEL: (EXACT, *TYPES)}
# Of the paper's F tests on MNIST, over 32 bits and the four types.
PAPER = {DATA: "F(4,4)=0.71, p=0.59", MODEL: "F(4,4)=0.54, p=0.71"}
CONFIDENCE = 0.99


@dataclass(frozen=True)
class Pace:
    """How long and on what is trained; `batch` is of all ranks together."""

    data: str
    images: int
    test_images: int
    epochs: int
    batch: int
    rate: float


QUICK = Pace("digits", 128, 64, 1, 32, 0.05)
SHORT = Pace("cifar10", 3_200, 2_000, 4, 64, 0.05)


def network() -> nn.Module:
    """The paper's CIFAR-10 network, a quarter as wide; a stride for its first pooling, no contrast normalisation."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        LocalConv2d(16, 8, (8, 8), 3, padding=1),
        nn.ReLU(),
        LocalConv2d(8, 8, (8, 8), 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def images_of(pace: Pace) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Normalised float images and labels by split."""
    found = {}
    if pace.data == "cifar10":
        for name, (x, y) in cifar10_images(torch.device("cpu")).items():
            rows = pace.images if name == "train" else pace.test_images
            found[name] = x[:rows].contiguous(), y[:rows].clone()
        return found
    source = open_digits()
    for name, samples, rows in (("train", source.train, pace.images), ("test", source.test, pace.test_images)):
        read = [samples.read(index) for index in range(rows)]
        x = torch.stack([torch.tensor(image, dtype=torch.float32) for image, _ in read])
        found[name] = (x - source.mean[0]) / source.deviation[0], torch.tensor([int(label) for _, label in read])
    return found


def error_percent(how: str, codec: str, seed: int, pace: Pace, data: dict[str, Any]) -> float:
    """One network's test error after training."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    net = network()
    named = None if codec == EXACT else codec
    closing: Any = None
    model: Any
    if how == DATA:
        model = nn.parallel.DistributedDataParallel(net)
        groups: Any = list(model.parameters())
        whole = groups
        closing = compress_gradients(model, named)
    else:
        model = closing = hybrid(net, named, gradient_codec=None)
        groups = model.parameter_groups()
        whole = groups[0]["params"]
    optimizer = torch.optim.SGD(groups, lr=pace.rate, momentum=0.9, weight_decay=5e-4)
    x, y = data["train"]
    draw = torch.Generator().manual_seed(seed)
    steps, done = math.ceil(len(x) / pace.batch) * pace.epochs, 0
    for _ in range(pace.epochs):
        for part in torch.randperm(len(x), generator=draw).split(pace.batch):
            for group in optimizer.param_groups:
                group["lr"] = pace.rate * 0.5 * (1 + math.cos(math.pi * done / steps))
            images, labels = x[part], y[part]
            if torch.rand((), generator=draw) < 0.5:
                images = images.flip(-1) if pace.data == "cifar10" else images
            optimizer.zero_grad()
            F.cross_entropy(model(images.tensor_split(ranks)[rank]), labels.tensor_split(ranks)[rank]).backward()
            optimizer.step()
            done += 1
    wrong = _wrong(model, data["test"])
    for parameter in whole:
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, parameter):
            raise WrongResult(f"{how}, {codec}: ranks hold other weights at the end")
    if closing is not None:
        closing.close()
    return 100 * wrong / len(data["test"][0])


@torch.no_grad()
def _wrong(model: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model.eval()
    wrong = torch.zeros((), dtype=torch.int64)
    for images, labels in zip(test[0].split(512), test[1].split(512), strict=True):
        found = model(images.tensor_split(ranks)[rank]).argmax(1)
        wrong += (found != labels.tensor_split(ranks)[rank]).sum()
    dist.all_reduce(wrong)
    return int(wrong)


class Rank:
    """One rank in a process of its own; see `bench.processes`. It answers a run with its test error in percent."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=os.environ["SHOAL_RANKS"], rank=rank, world_size=ranks)

    def __call__(self, asked: Mapping[str, Any], stage: Stage) -> float:
        data = torch.load(asked["data"], mmap=True, weights_only=True)
        return error_percent(asked["how"], asked["codec"], asked["seed"], Pace(**asked["pace"]), data)


def errors_by_run(ranks: int, at: str, pace: Pace, runs: Iterable[tuple[str, str, int]]) -> Iterator[float]:
    """The test error in percent of each (how, codec, seed), trained on so many ranks.

    Raises:
        InputError: a rank ended early.
        WrongResult: ranks hold other weights at the end.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool, ExitStack() as stack:
        joined = {"WORLD_SIZE": str(ranks), "SHOAL_RANKS": f"file://{folder}/store", "OMP_NUM_THREADS": "1"}
        joined = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **joined}
        made = [Worker("bench.parallel_accuracy:Rank", {**joined, "RANK": str(rank)}) for rank in range(ranks)]
        workers = [stack.enter_context(worker) for worker in made]
        for how, codec, seed in runs:
            asked = {"data": at, "pace": asdict(pace), "how": how, "codec": codec, "seed": seed}
            running = [pool.submit(worker.ask, asked) for worker in workers]
            for future in as_completed(running):  # where one fails the others would wait for it
                future.result()
            yield running[0].result()


def interval(errors: list[float]) -> tuple[float, float]:
    """The confidence interval of the mean.

    >>> [round(end, 2) for end in interval([10.0, 11.0, 12.0])]
    [5.27, 16.73]
    """
    from scipy import stats

    if len(errors) < 2:
        return (-math.inf, math.inf)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(errors) - 1))
    away = quantile * statistics.stdev(errors) / math.sqrt(len(errors))
    return statistics.mean(errors) - away, statistics.mean(errors) + away


def f_test(groups: list[list[float]]) -> str:
    """One-way analysis of variance over the groups.

    >>> f_test([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    'F(1,4)=1.50, p=0.29'
    """
    from scipy import stats

    if min(len(group) for group in groups) < 2:
        return "needs two seeds"
    found = stats.f_oneway(*groups)
    freedom = len(groups) - 1, sum(len(group) for group in groups) - len(groups)
    return f"F({freedom[0]},{freedom[1]})={found.statistic:.2f}, p={found.pvalue:.2f}"


def table(how: str, ranks: str, rows: dict[str, list[float]]) -> Table:
    tested = f_test([rows[codec] for codec in (EXACT, *TYPES)])
    shown = new_table(
        f"{how}, {ranks} ranks: test error; {tested}; the paper's on MNIST: {PAPER[how]}",
        "<type | mean and deviation | seeds | to 32 bits | 99 % interval of the mean | overlaps 32 bits'",
    )
    low, high = interval(rows[EXACT])
    for codec, errors in rows.items():
        mean, spread = statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else 0.0
        first, last = interval(errors)
        away = "" if codec == EXACT else f"{mean - statistics.mean(rows[EXACT]):+.2f}"
        overlaps = "" if codec == EXACT else "yes" if first <= high and low <= last else "no"
        each = ", ".join(f"{error:.1f}" for error in errors)
        shown.add_row(codec, f"{mean:.2f} ± {spread:.2f} %", each, away, f"{first:.1f} to {last:.1f}", overlaps)
    return shown


def _run(run: Run) -> None:
    asked = run.asked
    pace = paced(run, run.pick(SHORT, QUICK))
    errors: dict[str, Any] = run.resume("errors_percent", pace=asdict(pace)).get("errors_percent", {})
    data = images_of(pace)
    run.say(f"{asdict(pace)}, {asked.seeds} seeds, one thread a rank")
    run.result |= {"pace": asdict(pace), "errors_percent": errors}
    with tempfile.TemporaryDirectory() as folder:
        at = f"{folder}/images.pt"
        torch.save(data, at)
        for ranks in asked.ranks:
            rows = errors.setdefault(str(ranks), {how: {name: [] for name in names} for how, names in CODECS.items()})
            runs = [
                (how, codec, seed)
                for seed in range(asked.seeds)
                for how in HOW[asked.how]
                for codec in CODECS[how]
                if seed >= len(rows[how][codec])
            ]
            for (how, codec, _), error in zip(runs, errors_by_run(ranks, at, pace, runs), strict=True):
                rows[how][codec].append(error)
                run.save()
            run.say(*(table(how, str(ranks), rows[how]) for how in CODECS if all(rows[how].values())))


main = Bench(
    _run,
    option("--ranks", type=integers, default=[2, 4], help="numbers of ranks"),
    option("--how", default="both", choices=tuple(HOW)),
    *PACE_OPTIONS,
    quick="digits and a few steps: does it run?",
    resume="a file of the same pace: its runs are not run again",
)

if __name__ == "__main__":
    sys.exit(main())
