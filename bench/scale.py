"""How long before the first step, by the number of ops: seconds of each phase, cold and with all that is cached.

    python -m bench.scale                 DenseNet-121 and -201, EfficientNet-B7 and a GPT of 24 layers
    python -m bench.scale --parts plan    planning alone, for a GPU that is not here

`plan` is `shoal.plan` on the meta device for `--hardware`, at each share of what keeping everything takes. `step` is
the first step of `shoal.compile` on this machine inside the largest share, with an empty cache and again with what the
first wrote; the second run is in the same process, with Dynamo reset.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import CPU_TIME, Bench, Run, option, percentages
from bench.tables import cells, new_table
from examples import networks as models
from examples.networks.densenet import DenseNet
from shoal.cost import profile
from shoal.engine import pricing, session, step_planning
from shoal.errors import BudgetError

HARDWARE = "v100-nvlink2"
SHARES = [70.0, 40.0]
PARTS = ("plan", "step")


class _Attention(nn.Module):
    """One layer of GPT-2, written out op by op."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        weights = q @ k.transpose(2, 3) / math.sqrt(width / self.heads)
        earlier = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = self.dropout(weights.masked_fill(~earlier, -1e9).softmax(-1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(batch, length, width)))
        y = self.up(self.norm2(x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        return x + self.dropout(self.down(y))


class Gpt(nn.Module):
    """GPT-2 of some width and depth."""

    def __init__(self, layers: int = 24, width: int = 1024, heads: int = 16, words: int = 50257) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.layers = nn.Sequential(*(_Attention(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.layers(x)))


class _Squeeze(nn.Module):
    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class _Inverted(nn.Module):
    def __init__(self, before: int, after: int, wider: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = before * wider
        widen = [nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU()] if wider > 1 else []
        self.body = nn.Sequential(
            *widen,
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
            _Squeeze(wide, max(1, before // 4)),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skips = stride == 1 and before == after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.skips else self.body(x)


# Tan and Le, "EfficientNet" (2019), table 1: wider, channels, layers, kernel, stride.
_STAGES = ((1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2), (6, 112, 3, 5, 1))
_LAST_STAGES = ((6, 192, 4, 5, 2), (6, 320, 1, 3, 1))


def efficientnet(width: float = 2.0, depth: float = 3.1) -> nn.Module:
    """EfficientNet-B7 without stochastic depth, which would be another graph every step."""

    def scaled(channels: int) -> int:
        return max(8, int(channels * width + 4) // 8 * 8)

    channels = scaled(32)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.SiLU()]
    for wider, narrow, count, kernel, stride in (*_STAGES, *_LAST_STAGES):
        for number in range(math.ceil(count * depth)):
            layers.append(_Inverted(channels, scaled(narrow), wider, kernel, stride if number == 0 else 1))
            channels = scaled(narrow)
    last = scaled(1280)
    layers += [nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.SiLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(last, 1000))


class _Network(NamedTuple):
    make: Callable[[], nn.Module]
    example: Callable[[], torch.Tensor]


def _images(batch: int, side: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(batch, 3, side, side)


NETWORKS = {
    "densenet121": _Network(partial(models.build, "densenet121"), _images(8, 160)),
    "densenet201": _Network(partial(DenseNet, (6, 12, 48, 32)), _images(8, 160)),
    "efficientnet_b7": _Network(efficientnet, _images(4, 160)),
    "gpt24": _Network(Gpt, lambda: torch.zeros(2, 512, dtype=torch.long)),
}


def _chain() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 8, 8, 8, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers)


QUICK_NETWORKS = {"chain": _Network(_chain, _images(8, 32))}


def measure_all(run: Run) -> None:
    """Print a row for each network and part, and save them."""
    networks = run.pick(NETWORKS, QUICK_NETWORKS)
    networks = {name: network for name, network in networks.items() if name in (run.asked.networks or networks)}
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in run.asked.parts}
    for name, network in networks.items():
        if "plan" in rows:
            rows["plan"] += plan_rows(run, name, network)
        if "step" in rows:
            rows["step"] += step_rows(run, name, network)
        run.save(rows=rows, shares=run.asked.shares)
    for part, found in rows.items():
        columns, formats = TABLES[part]
        table = new_table(f"{part}: seconds", columns)
        for row in found:
            table.add_row(*cells(formats, row))
        run.say(table)


TABLES = {
    "plan": (
        "<network|ops|share %|plan|capture|planner|added %|bound %",
        "{network}|{ops}|{share:.0f}|{seconds:.1f}|{capture_seconds:.1f}|{planner_seconds:.1f}"
        "|{added_percent:.1f}|{bound_percent:.1f}",
    ),
    "step": (
        "<network|<cache|ops|first step|op times|planner|the rest|later step|predicted",
        "{network}|{cache}|{ops}|{seconds:.1f}|{profile_seconds:.1f}|{planner_seconds:.1f}|{rest_seconds:.1f}"
        "|{later_seconds:.2f}|{predicted_seconds:.2f}",
    ),
}


def plan_rows(run: Run, name: str, network: _Network) -> list[dict[str, Any]]:
    """`shoal.plan` of one network on the meta device."""
    with torch.device("meta"):
        model, example = network.make(), network.example()
    hardware = run.asked.hardware
    plain_bytes = shoal.plan(model, example, hardware=hardware, offload_to=None).predicted_peak_bytes
    rows = []
    for share in run.asked.shares:
        with empty_cache(), timed(run.clock, (pricing, "joint_step"), (step_planning, "remembered")) as spent:
            started = run.clock()
            row: dict[str, Any] = {"network": name, "share": share}
            try:
                budget_bytes = int(plain_bytes * share / 100)
                plan = shoal.plan(model, example, budget_bytes, hardware=hardware, offload_to=None, allow="bitwise")
                row["ops"] = len(plan.graph.ops)
                row["added_percent"] = 100 * plan.added_seconds / plan.plain_seconds
                row["bound_percent"] = 100 * plan.least_added_seconds / plan.plain_seconds
            except BudgetError as error:
                row["refused"] = str(error)
            row["seconds"] = run.clock() - started
        rows.append({**row, "capture_seconds": spent["joint_step"], "planner_seconds": spent["remembered"]})
    return rows


def step_rows(run: Run, name: str, network: _Network) -> list[dict[str, Any]]:
    """The first step of one network here, with an empty cache and with the one it left."""
    with torch.device("meta"):
        model, example = network.make(), network.example()
    plain_bytes = shoal.plan(model, example, hardware=run.asked.hardware, offload_to=None).predicted_peak_bytes
    budget_bytes = int(plain_bytes * max(run.asked.shares) / 100)
    rows = []
    with empty_cache():
        for cache in ("empty", "filled"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            net, example = network.make(), network.example()
            compiled = shoal.compile(net, budget=budget_bytes, allow="bitwise")
            phases = ((session, "profile_step"), (profile, "_measure_each"), (step_planning, "remembered"))
            with timed(run.clock, *phases) as spent:
                started = run.clock()
                take_step(compiled, example)
                seconds = run.clock() - started
            later = []
            for _ in range(3):
                net.zero_grad()
                started = run.clock()
                take_step(compiled, example)
                later.append(run.clock() - started)
            plan = compiled.shoal.plan
            profile_seconds, planner_seconds = spent["profile_step"], spent["remembered"]
            rows.append(
                {
                    "network": name,
                    "cache": cache,
                    "ops": len(plan.graph.ops),
                    "seconds": seconds,
                    "profile_seconds": profile_seconds,
                    "timing_seconds": spent["_measure_each"],
                    "planner_seconds": planner_seconds,
                    "rest_seconds": seconds - profile_seconds - planner_seconds,
                    "later_seconds": min(later),
                    "predicted_seconds": plan.predicted_seconds,
                }
            )
    return rows


def take_step(model: nn.Module, example: torch.Tensor) -> None:
    """Forward and backward pass."""
    model(example).sum().backward()


@contextmanager
def empty_cache() -> Iterator[None]:
    """An empty cache folder, inside the block."""
    before = os.environ.get("SHOAL_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["SHOAL_CACHE"]
            else:
                os.environ["SHOAL_CACHE"] = before


@contextmanager
def timed(clock: Callable[[], float], *functions: tuple[Any, str]) -> Iterator[dict[str, float]]:
    """Seconds spent in functions of modules, by name; of `remembered`, in the planners that it returns."""
    spent = {name: 0.0 for _, name in functions}

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += clock() - started

        return call

    real = [(module, name, getattr(module, name)) for module, name in functions]
    for module, name, function in real:
        if name == "remembered":
            setattr(module, name, lambda planner, found=function, **how: wrapped("remembered", found(planner, **how)))
        else:
            setattr(module, name, wrapped(name, function))
    try:
        yield spent
    finally:
        for module, name, function in real:
            setattr(module, name, function)


main = Bench(
    measure_all,
    option("--networks", known=(*NETWORKS, *QUICK_NETWORKS)),
    option("--parts", known=PARTS, default=list(PARTS)),
    option("--shares", type=percentages, default=SHARES, minimum=None, help="budgets in percent of plain PyTorch"),
    option("--hardware", default=HARDWARE, minimum=None, help="a preset, for planning"),
    CPU_TIME,
)

if __name__ == "__main__":
    sys.exit(main())
