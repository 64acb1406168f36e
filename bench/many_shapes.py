"""Inputs of many shapes: how often is a model captured, how long does that take, does every step stay in the budget?

    python -m bench.many_shapes             text of many lengths, images of many sizes, a last batch
    python -m bench.many_shapes --quick     a few shapes of each

Every shape is trained on twice, in two epochs of different order. In the first, loss and gradients are held against
those of plain PyTorch, bit for bit. In the second, the bytes in use are counted by PyTorch's memory events, not by
Shoal's own meter. The budget is a share of what plain PyTorch takes at the largest shape.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import CPU_TIME, Bench, Run, WrongResult, option, percentages
from bench.tables import cells, new_table
from shoal.errors import BudgetError
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes

WORDS, CLASSES = 200, 10
COLUMNS = (
    "<network|steps|shapes|captures|plans|first steps s|usual step ms|plain ms|share %|budget|largest peak"
    "|of the budget %|<equal"
)
FORMATS = (
    "{network}|{steps}|{shapes}|{captures}|{plans}|{capturing_seconds:.1f}|{step_seconds:ms}|{plain_seconds:ms}"
    "|{share:.0f}|{budget_bytes:bytes}|{peak_bytes:bytes}|{of_budget_percent:.1f}|{equal}"
)


class _Convolved(nn.Module):
    """A text classifier: embedding, convolutions over the words, the largest answer of each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layers = [[nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.Dropout(0.1)] for _ in range(4)]
        self.body = nn.Sequential(*(module for layer in layers for module in layer))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(tokens).transpose(1, 2)).amax(-1))


class _Recurrent(nn.Module):
    """A text classifier around an LSTM, which Dynamo leaves out: what comes before and behind it are graphs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, width), nn.LSTM(width, width // 4, batch_first=True)
        layers = [[nn.Conv1d(width // 4 if not place else width, width, 5, padding=2), nn.ReLU()] for place in range(4)]
        self.body = nn.Sequential(*(module for layer in layers for module in layer))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.lstm(self.words(tokens))[0].transpose(1, 2)).amax(-1))


class _Encoder(nn.Module):
    """A text classifier: three layers of self-attention, which ignores what is padded."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.layers(x, src_key_padding_mask=tokens == 0).mean(1))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + x)


def _images() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    rest = [nn.MaxPool2d(2), _Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*stem, *(_Block(16) for _ in range(3)), *rest)


class _Printing(nn.Module):
    """A residual network in a loop that prints, which makes each stage a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.stages = nn.ModuleList([nn.Sequential(_Block(16), _Block(16)) for _ in range(2)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
            print(end="")
        return self.head(x.mean((2, 3)))


class _Case(NamedTuple):
    make: Callable[[], nn.Module]
    shapes: Sequence[tuple[int, ...]]  # of one epoch's batches


def _texts(lengths: Sequence[int], batch: int = 8) -> list[tuple[int, ...]]:
    return [(batch, length) for length in lengths]


def _squares(sides: Sequence[int], batch: int = 4) -> list[tuple[int, ...]]:
    return [(batch, 3, side, side) for side in sides]


CASES = {
    "convolved text": _Case(_Convolved, _texts(range(10, 210))),
    "recurrent text": _Case(_Recurrent, _texts(range(10, 210))),
    "encoder": _Case(_Encoder, _texts(range(10, 170, 2))),
    "images": _Case(_images, _squares(range(72, 232, 8))),
    "printing images": _Case(_Printing, _squares(range(72, 232, 8))),
    "last batch": _Case(_images, [*[(8, 3, 96, 96)] * 8, (3, 3, 96, 96)]),
}
QUICK_CASES = {
    "convolved text": _Case(_Convolved, _texts(range(20, 120, 10))),
    "last batch": _Case(_images, [(8, 3, 64, 64), (8, 3, 64, 64), (3, 3, 64, 64)]),
}


def measure_all(run: Run) -> None:
    """Print a row for each network and share, and save them."""
    cases = run.chosen(CASES, QUICK_CASES)
    rows: list[dict[str, Any]] = []
    for name, case in cases.items():
        for share in run.asked.shares:
            try:
                rows.append(_measured(run, name, case, share))
            except BudgetError as refused:
                run.say(f"{name} at {share:.0f} %: refused: {refused}")
            run.save(rows=rows)
    table = new_table("Many shapes", COLUMNS)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.say(table)
    wrong = [row["network"] for row in rows if not row["equal"] or row["of_budget_percent"] > 100]
    if wrong:
        raise WrongResult(f"{', '.join(wrong)}: gradients differ from plain PyTorch's, or a step passed the budget")


def _measured(run: Run, name: str, case: _Case, share: float) -> dict[str, Any]:
    torch.manual_seed(run.asked.seed)
    plain = case.make()
    largest = max(case.shapes, key=lambda shape: torch.Size(shape).numel())
    _step(plain, _batch(largest))  # what a first step alone allocates
    _free_gradients(plain)
    budget_bytes = int(share / 100 * _peak_bytes(plain, _batch(largest)))
    _free_gradients(plain)
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes, allow="bitwise", name=name)
    equal, capturing_seconds, times = True, 0.0, {"ours": [0.0], "plain": [0.0]}
    order = random.Random(run.asked.seed)
    for number, shape in enumerate(_in_turn(case.shapes, order)):
        batch, prepared = _batch(shape, number), len(ours.shoal.preparations)
        taken = {}
        for who, model in (("ours", ours), ("plain", plain)):
            torch.manual_seed(number)
            started = run.clock()
            _step(model, batch)
            taken[who] = run.clock() - started
        if len(ours.shoal.preparations) > prepared:
            capturing_seconds += taken["ours"]
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        equal &= all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
        _free_gradients(ours), _free_gradients(plain)
    peaks = []
    for number, shape in enumerate(_in_turn(case.shapes, order)):
        batch = _batch(shape, number)
        for who, model in (("ours", ours), ("plain", plain)):
            started = run.clock()
            _step(model, batch)
            times[who].append(run.clock() - started)
            _free_gradients(model)
        peaks.append(_peak_bytes(ours, batch))
        _free_gradients(ours)
    return {
        "network": name,
        "share": share,
        "steps": 3 * len(case.shapes),
        "shapes": len(set(case.shapes)),
        "captures": ours.shoal.captures,
        "plans": len(ours.shoal.plans),
        "capturing_seconds": capturing_seconds,
        "step_seconds": times["ours"][1:],
        "plain_seconds": times["plain"][1:],
        "budget_bytes": budget_bytes,
        "peak_bytes": max(peaks),
        "of_budget_percent": 100 * max(peaks) / budget_bytes,
        "equal": equal,
    }


def _in_turn(shapes: Sequence[tuple[int, ...]], order: random.Random) -> list[tuple[int, ...]]:
    """The shapes of an epoch: shuffled, but a short last batch comes last."""
    if len(set(shapes)) == len(shapes):
        return order.sample(shapes, len(shapes))
    return list(shapes)


def _batch(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 2:
        return torch.randint(1, WORDS, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def _step(model: nn.Module, batch: torch.Tensor) -> None:
    F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long)).backward()


def _free_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _peak_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    gc.collect()
    there = distinct_bytes([*model.parameters(), *model.buffers(), batch])
    return there + allocations.peak_bytes(allocations.record(lambda: _step(model, batch))[1])


main = Bench(
    measure_all,
    option("--networks", known=list(CASES), default=None, help="comma-separated; by default all"),
    option("--shares", type=percentages, default=[60.0], minimum=None, help="budgets, in %% of plain PyTorch's peak"),
    CPU_TIME,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
