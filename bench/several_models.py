"""Several models under one budget: does a step of all of them stay inside it, and train as plain PyTorch does?

    python -m bench.several_models                  every kind, at 70 and 50 % of plain PyTorch's peak
    python -m bench.several_models --quick          two of them at 70 %
    python -m bench.several_models --networks gan,clip

Each kind trains for six steps beside plain PyTorch with the same numbers drawn. Parameters, buffers and gradients after
every step are held against it, bit for bit. The bytes in use are counted around a whole step by the allocator, and what
models and optimizers hold before it is added; the gradients and the state of optimizers are among them.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import CPU_TIME, Bench, Run, WrongResult, option, percentages
from bench.tables import cells, new_table
from shoal.errors import ShoalError
from shoal.memory.limit import memory_limit
from shoal.memory.storage_bytes import distinct_bytes

STEPS = 6
COLUMNS = (
    "<kind|share %|budget|predicted|largest peak|of the budget %|<result|first step s|second step s|step ms|plain ms"
)
FORMATS = (
    "{kind}|{share:.0f}|{budget_bytes:bytes}|{predicted_bytes:bytes}|{peak_bytes:bytes}|{of_budget_percent:.1f}"
    "|{result}|{first_seconds:.1f}|{second_seconds:.1f}|{step_seconds:ms}|{plain_seconds:ms}"
)
Models = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]
Step = Callable[[Models, Optimizers], None]


def _blocks(inputs: int, channels: int, n: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place in range(n):
        before = inputs if place == 0 else channels
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


class _Encoder(nn.Module):
    """Images to vectors."""

    def __init__(self, outputs: int = 16, channels: int = 16) -> None:
        super().__init__()
        self.body, self.head = _blocks(3, channels), nn.Linear(channels, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class _Generator(nn.Module):
    """Noise to images."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.body, self.head = _blocks(4, channels), nn.Conv2d(channels, 3, 1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(z)).tanh()


class _Printing(_Encoder):
    """The same as two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        print(end="")
        return self.head(y.mean((2, 3)))


def _batch(channels: int = 3) -> torch.Tensor:
    return torch.randn(8, channels, 40, 40)


def _step(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _gan(models: Models, optimizers: Optimizers) -> None:
    """The loop of PyTorch's DCGAN example: what the generator saved waits while the discriminator takes its step."""
    generator, discriminator = models
    real, noise = _batch(), _batch(4)
    discriminator.zero_grad()
    F.softplus(-discriminator(real)).mean().backward()
    fake = generator(noise)
    F.softplus(discriminator(fake.detach())).mean().backward()
    optimizers[1].step()
    generator.zero_grad()
    F.softplus(-discriminator(fake)).mean().backward()
    optimizers[0].step()


def _gan_frozen(models: Models, optimizers: Optimizers) -> None:
    """Alternating turns; the discriminator's parameters are frozen in the generator's."""
    generator, discriminator = models
    with torch.no_grad():
        fake = generator(_batch(4))
    (F.softplus(-discriminator(_batch())) + F.softplus(discriminator(fake))).mean().backward()
    _step(optimizers[1:])
    discriminator.requires_grad_(False)
    F.softplus(-discriminator(generator(_batch(4)))).mean().backward()
    discriminator.requires_grad_(True)
    _step(optimizers[:1])


def _clip(models: Models, optimizers: Optimizers) -> None:
    image, text = models
    similarity = F.normalize(image(_batch())) @ F.normalize(text(_batch())).T
    F.cross_entropy(10 * similarity, torch.arange(8)).backward()
    _step(optimizers)


def _pairs(models: Models, optimizers: Optimizers) -> None:
    """Each of two encoders is called twice before one backward pass."""
    one, other = models
    x = _batch()
    ((one(x) - other(x.flip(3))).square().mean() + (one(x.flip(2)) - other(x.flip(0))).square().mean()).backward()
    _step(optimizers)


def _teacher(models: Models, optimizers: Optimizers) -> None:
    teacher, student = models
    x = _batch()
    teacher.eval()
    with torch.no_grad():
        wanted = teacher(x)
    F.mse_loss(student(x), wanted).backward()
    _step(optimizers[1:])


def _average(models: Models, optimizers: Optimizers) -> None:
    """A moving average of the weights, which gives the targets."""
    trained, average = models
    x = _batch()
    average.eval()
    with torch.no_grad():
        wanted = average(x.flip(3))
    F.mse_loss(trained(x), wanted).backward()
    _step(optimizers[:1])
    with torch.no_grad():
        for own, new in zip(average.parameters(), trained.parameters(), strict=True):
            own.lerp_(new, 0.01)


def _two_losses(models: Models, optimizers: Optimizers) -> None:
    one, other = models
    both = one(_batch()) * other(_batch())
    both.square().mean().backward(retain_graph=True)
    both.abs().mean().backward()
    _step(optimizers)


def _encoders() -> list[nn.Module]:
    return [_Encoder(), _Encoder(channels=24)]


def _networks() -> list[nn.Module]:
    return [_Generator(), _Encoder(1)]


def _average_of(model: nn.Module) -> list[nn.Module]:
    return [model, copy.deepcopy(model)]


KINDS: dict[str, tuple[Callable[[], list[nn.Module]], Step]] = {
    "gan": (_networks, _gan),
    "gan with frozen turns": (_networks, _gan_frozen),
    "clip": (_encoders, _clip),
    "clip of several graphs": (lambda: [_Printing(), _Encoder(channels=24)], _clip),
    "pairs": (_encoders, _pairs),
    "teacher and student": (lambda: _encoders()[::-1], _teacher),
    "moving average": (lambda: _average_of(_Encoder()), _average),
    "two losses": (_encoders, _two_losses),
}
QUICK_KINDS = {name: KINDS[name] for name in ("gan", "clip")}


def measure_all(run: Run) -> None:
    """Print a row for each kind and share, and save them."""
    rows: list[dict[str, Any]] = []
    shares = run.asked.shares or ([70.0] if run.asked.quick else [70.0, 50.0])
    for name, (make, step) in run.chosen(KINDS, QUICK_KINDS).items():
        rows += _measured(run, name, make, step, shares)
        run.save(rows=rows)
    table = new_table("Several models under one budget", COLUMNS)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.say(table)
    for row in rows:
        if row["refused"]:
            run.say(f"{row['kind']} at {row['share']:.0f} %: {row['refused']}")
        if row["said"]:
            run.say(f"{row['kind']} at {row['share']:.0f} %: {row['said']}")
    ran = [row for row in rows if not row["refused"]]
    broken = [r["kind"] for r in ran if r["wrong"] or (r["of_budget_percent"] > 100 and not r["said"])]
    if broken:
        raise WrongResult(f"{', '.join(broken)}: not what plain PyTorch leaves, or a step passed the budget")


def _measured(
    run: Run, name: str, make: Callable[[], list[nn.Module]], step: Step, shares: list[float]
) -> Iterator[dict[str, Any]]:
    torch.manual_seed(run.asked.seed)
    first = make()
    models = copy.deepcopy(first)
    optimizers = _optimizers(models)
    plain_bytes = max(_take(run, step, models, optimizers, number)[0] for number in range(3))
    del models, optimizers
    for share in shares:
        yield _row(run, name, first, step, share, plain_bytes)


def _row(run: Run, name: str, first: list[nn.Module], step: Step, share: float, plain_bytes: int) -> dict[str, Any]:
    budget_bytes = int(share / 100 * plain_bytes)
    row: dict[str, Any] = {"kind": name, "share": share, "budget_bytes": budget_bytes, "plain_peak_bytes": plain_bytes}
    row |= dict.fromkeys(("predicted_bytes", "peak_bytes", "of_budget_percent", "first_seconds", "second_seconds"))
    row |= {"step_seconds": None, "plain_seconds": None, "refused": "", "wrong": False, "said": ""}
    plain, ours = copy.deepcopy(first), copy.deepcopy(first)
    shared = shoal.Budget(budget_bytes)
    of = {id(ours): _optimizers(ours), id(plain): _optimizers(plain)}
    seconds: dict[int, list[float]] = {id(ours): [], id(plain): []}
    wanted: list[list[Any]] = []
    peaks: list[int] = []
    differs, said = False, _Said()
    logging.getLogger("shoal").addHandler(said)
    for number in range(STEPS):  # before there is a budget, which counts all that is allocated
        seconds[id(plain)].append(_take(run, step, plain, of[id(plain)], number)[1])
        wanted.append(_values(plain))
    try:
        for number, model in enumerate(ours):
            shoal.compile(model, budget=shared, allow="bitwise", name=f"{type(model).__name__} {number}")
        for number in range(STEPS):
            peak_bytes, took = _take(run, step, ours, of[id(ours)], number)
            seconds[id(ours)].append(took)
            peaks.append(peak_bytes)
            differs |= _values(ours) != wanted[number]
    except ShoalError as error:
        return row | {"refused": str(error), "result": f"refused: {type(error).__name__}"}
    finally:
        logging.getLogger("shoal").removeHandler(said)
    over = " (over, and said)" if said.text and max(peaks) > budget_bytes else ""
    return row | {
        "said": said.text,
        "predicted_bytes": shared.predicted_peak_bytes,
        "peak_bytes": max(peaks),
        "of_budget_percent": 100 * max(peaks) / budget_bytes,
        "result": ("differs" if differs else "equal") + over,
        "wrong": differs,
        "first_seconds": seconds[id(ours)][0],
        "second_seconds": seconds[id(ours)][1],
        "step_seconds": seconds[id(ours)][3:],
        "plain_seconds": seconds[id(plain)][3:],
    }


class _Said(logging.Handler):
    """What was said to be over the budget by itself, whatever the plan."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "no plan changes it" in record.getMessage():
            self.text = record.getMessage()


def _optimizers(models: Models) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters()) for model in models]


def _take(run: Run, step: Step, models: Models, optimizers: Optimizers, seed: int) -> tuple[int, float]:
    """The peak of a whole step, and how long it takes."""
    torch.manual_seed(seed)
    gc.collect()
    standing = [t for model in models for t in (*model.parameters(), *model.buffers())]
    standing += [p.grad for model in models for p in model.parameters() if p.grad is not None]
    standing += [v for one in optimizers for state in one.state.values() for v in state.values() if torch.is_tensor(v)]
    with memory_limit(None) as meter:
        before_bytes = meter.live_bytes
        meter.reset_peak()
        started = run.clock()
        step(models, optimizers)
        seconds = run.clock() - started
        return distinct_bytes(standing) + meter.peak_bytes - before_bytes, seconds


def _values(models: Models) -> list[Any]:
    """Parameters, buffers and gradients, as text: no tensors, which would count."""
    tensors = [t for model in models for t in model.state_dict().values()]
    gradients = [p.grad for model in models for p in model.parameters()]
    return [None if t is None else hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in (*tensors, *gradients)]


main = Bench(
    measure_all,
    option("--networks", known=list(KINDS), default=None, help="comma-separated; by default all"),
    option("--shares", type=percentages, default=[], minimum=None, help="budgets, in %% of plain PyTorch's peak"),
    CPU_TIME,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
