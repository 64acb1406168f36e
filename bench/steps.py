"""Kinds of training steps that scripts have: does each train inside a budget, and as plain PyTorch does?

    python -m bench.steps                   every kind, at 70 and 50 % of plain PyTorch's peak
    python -m bench.steps --quick           three of them at 70 %
    python -m bench.steps --networks item,lstm

Each kind trains for four steps beside plain PyTorch, with the same numbers drawn. The gradients of every step are held
against it: equal bit for bit, or the largest difference in units of the tensor's largest value. The bytes in use are
counted around a whole step by PyTorch's memory events, not by Shoal's own meter. A kind whose library is missing is
skipped.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import CPU_TIME, Bench, Run, Unavailable, WrongResult, option, percentages
from bench.tables import cells, new_table
from shoal.errors import ShoalError
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes

STEPS = 4
COLUMNS = "<kind|graphs|share %|budget|predicted|largest peak|of the budget %|<result|first step s|step ms|plain ms"
FORMATS = (
    "{kind}|{graphs}|{share:.0f}|{budget_bytes:bytes}|{predicted_bytes:bytes}|{peak_bytes:bytes}"
    "|{of_budget_percent:.1f}|{result}|{first_seconds:.1f}|{step_seconds:ms}|{plain_seconds:ms}"
)
_TOLERANCE = 1e-5  # of a gradient's largest value, where kernels round otherwise

Step = Callable[[nn.Module], None]


def _blocks(inputs: int, channels: int, n: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(n):
        before = inputs if place == 0 else channels
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


class _Stages(nn.Module):
    """Four stages of a convolutional network, and what a script does between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], channels: int = 16) -> None:
        super().__init__()
        self.stages = nn.ModuleList([_blocks(3 if place == 0 else channels, channels) for place in range(4)])
        self.between = between
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = self.between(stage(x))
        return self.head(x.mean((2, 3)))


class _Written(_Stages):
    """The same without a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(self.stages[0](x))
        x = self.between(self.stages[1](x))
        x = self.between(self.stages[2](x))
        return self.head(self.stages[3](x).mean((2, 3)))


class _Recurrent(nn.Module):
    """An LSTM between convolutions."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv1d(3, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2))
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.after = nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x.flatten(2)[..., :256]).relu()
        y, _ = self.lstm(y.transpose(1, 2))
        return self.head(self.after(y.transpose(1, 2)).mean(-1))


class _Reading(nn.Module):
    """Convolutions, and an LSTM over the columns of what they found, as recognisers of text have it."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.body, self.narrow = _blocks(3, channels, 6), nn.MaxPool2d(4)
        self.lstm = nn.LSTM(12 * channels, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.narrow(self.body(x)).flatten(1, 2).transpose(1, 2)
        return self.head(self.lstm(columns)[0].mean(1))


class _Detecting(nn.Module):
    """Keeps the images whose score is high, and computes further on those alone."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.body, self.score = _blocks(3, channels, 6), nn.Linear(channels, 1)
        self.refine, self.head = _blocks(channels, channels, 3), nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        scores = self.score(features.mean((2, 3)))[:, 0]
        chosen = torch.nonzero(scores >= scores.median())[:, 0]
        return self.head(self.refine(features[chosen]).mean((2, 3))).mean(0, keepdim=True) + scores.mean()


def _prints(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x


def _scales(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + abs(x.mean().item()))


def _branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.mean() > -1 else -x


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _calls_a_library(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * (x.sigmoid() * x.tanh()).sin()


def _images(model: nn.Module) -> None:
    x = torch.randn(8, 3, 48, 48)
    out = model(x)
    F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long)).backward()


def _pairs(model: nn.Module) -> None:
    """Two calls before one backward pass."""
    x = torch.randn(4, 3, 48, 48)
    (model(x) - model(x.flip(0))).square().mean().backward()


def _gpt2() -> tuple[nn.Module, Step]:
    if importlib.util.find_spec("transformers") is None:
        raise Unavailable("transformers is not installed")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**config))

    def step(model: nn.Module) -> None:
        tokens = torch.randint(0, 1000, (4, 64))
        model(input_ids=tokens, labels=tokens).loss.backward()

    return model, step


Kind = Callable[[], tuple[nn.Module, Step]]

KINDS: dict[str, Kind] = {
    "print in a loop": lambda: (_Stages(_prints), _images),
    "print": lambda: (_Written(_prints), _images),
    "item": lambda: (_Written(_scales), _images),
    "branch on a value": lambda: (_Written(_branches), _images),
    "library call": lambda: (_Written(_calls_a_library), _images),
    "two calls": lambda: (_Stages(_prints), _pairs),
    "detection": lambda: (_Detecting(), _images),
    "lstm": lambda: (_Recurrent(), _images),
    "lstm over columns": lambda: (_Reading(), _images),
    "gpt2 with labels": _gpt2,
}
QUICK_KINDS = {name: KINDS[name] for name in ("print in a loop", "item", "lstm")}


def measure_all(run: Run) -> None:
    """Print a row for each kind and share, and save them."""
    rows: list[dict[str, Any]] = []
    shares = run.asked.shares or ([70.0] if run.asked.quick else [70.0, 50.0])
    for name, kind in run.chosen(KINDS, QUICK_KINDS).items():
        try:
            rows += measured(run, name, kind, shares)
        except Unavailable as reason:
            run.skip(name, reason)
        run.save(rows=rows)
    run.reject_nothing(rows)
    table = new_table("Kinds of steps", COLUMNS)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.say(table)
    for row in rows:
        if row["refused"]:
            run.say(f"{row['kind']} at {row['share']:.0f} %: {row['refused']}")
    broken = [row["kind"] for row in rows if not row["refused"] and (row["wrong"] or row["of_budget_percent"] > 100)]
    if broken:
        raise WrongResult(f"{', '.join(broken)}: gradients differ from plain PyTorch's, or a step passed the budget")


def measured(run: Run, name: str, kind: Kind, shares: list[float]) -> Iterator[dict[str, Any]]:
    """A row for each share of plain PyTorch's peak."""
    torch.manual_seed(run.asked.seed)
    plain, step = kind()
    _take(step, plain, 0)  # what a first step alone allocates
    plain_bytes = _peak_bytes(step, plain, 0)
    for share in shares:
        yield _row(run, name, copy.deepcopy(plain), step, share, plain_bytes)


def _row(run: Run, name: str, plain: nn.Module, step: Step, share: float, plain_bytes: int) -> dict[str, Any]:
    budget_bytes = int(share / 100 * plain_bytes)
    row: dict[str, Any] = {"kind": name, "share": share, "budget_bytes": budget_bytes, "plain_peak_bytes": plain_bytes}
    row |= dict.fromkeys(("graphs", "predicted_bytes", "peak_bytes", "of_budget_percent", "first_seconds"))
    row |= {"step_seconds": None, "plain_seconds": None, "refused": "", "wrong": False}
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes, allow="bitwise", name=name)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    worst, peaks = 0.0, []
    try:
        for number in range(STEPS):
            for who, model in (("ours", ours), ("plain", plain)):
                started = run.clock()
                _take(step, model, number)
                seconds[who].append(run.clock() - started)
            worst = max(worst, _difference(ours, plain))
            for model in (ours, plain):
                _free_gradients(model)
            peaks.append(_peak_bytes(step, ours, number))
    except ShoalError as error:
        return row | {"refused": str(error), "result": f"refused: {type(error).__name__}"}
    plan = ours.shoal.plan
    graphs = {op.name.split(".")[0] for op in plan.graph.ops if op.name.startswith("part")} if plan else set()
    return row | {
        "graphs": max(1, len(graphs)),
        "predicted_bytes": ours.shoal.predicted_peak_bytes,
        "peak_bytes": max(peaks),
        "of_budget_percent": 100 * max(peaks) / budget_bytes,
        "result": "equal" if not worst else f"within {worst:.0e}",
        "wrong": worst > _TOLERANCE,
        "first_seconds": seconds["ours"][0],
        "step_seconds": seconds["ours"][2:],
        "plain_seconds": seconds["plain"][2:],
    }


def _take(step: Step, model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    step(model)


def _difference(ours: nn.Module, plain: nn.Module) -> float:
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    found = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in found)


def _free_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _peak_bytes(step: Step, model: nn.Module, seed: int) -> int:
    """Of a whole step: parameters and buffers, and all that it allocates, the batch included."""
    gc.collect()
    there_bytes = distinct_bytes([*model.parameters(), *model.buffers()])
    _, events = allocations.record(lambda: _take(step, model, seed))
    _free_gradients(model)
    return there_bytes + allocations.peak_bytes(events)


main = Bench(
    measure_all,
    option("--networks", known=list(KINDS), default=None, help="comma-separated; by default all"),
    option("--shares", type=percentages, default=[], minimum=None, help="budgets, in %% of plain PyTorch's peak"),
    CPU_TIME,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
