"""What takes a network's step in the benchmark of compiled regions: eager PyTorch, `torch.compile`, Shoal."""

from __future__ import annotations

import copy
import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError
from torch.nn.modules.dropout import _DropoutNd

from bench.frame import Unavailable, WrongResult
from bench.interleave import Clock, turns
from bench.network import Setting
from bench.workload import Forward, Workload, make_workload
from shoal.engine.api import compile as compile_model
from shoal.engine.options import Options
from shoal.errors import BudgetError

EAGER, INDUCTOR = "eager", "torch.compile"
OURS = ("shoal eager", "shoal compiled")
_MOST_ERROR = {"float32": 0.02, "bfloat16": 0.5}
_NEXT_TO_NOTHING = 1e-12  # of the squares of all gradients


class _Gpt2(nn.Module):
    """GPT-2 small on tokens, logits as cross entropy takes them."""

    def __init__(self) -> None:
        super().__init__()
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise Unavailable(f"gpt2 needs transformers, which does not import here ({error})") from error
        self.network = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(tokens, use_cache=False).logits
        return logits.transpose(1, 2)


def workload_of(name: str, setting: Setting, seed: int, device: str = "cpu") -> Workload:
    """The step of one network.

    Raises:
        Unavailable: the library that it is of does not import here.
    """
    if name != "gpt2":
        return make_workload(name, setting.batch, setting.image, seed=seed, device=device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Gpt2().train().to(device)
    draw = torch.Generator().manual_seed(seed)
    shape = (setting.batch, setting.image)
    tokens, target = (torch.randint(50257, shape, generator=draw).to(device) for _ in range(2))
    return Workload(name, model, tokens, target, seed)


def in_precision(forward: Forward, precision: str) -> Forward:
    """The model's call under autocast where the precision is not float32."""
    if precision == "float32":
        return forward

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, getattr(torch, precision)):
            return forward(x)

    return call


def by_inductor(workload: Workload, value: float | None, eager_draws: bool = False) -> Forward:
    """`torch.compile` of the model, at a value of `activation_memory_budget`; compiled at its first call.

    Args:
        eager_draws: draw masks with PyTorch's kernels, as eager does, instead of Inductor's own.
    """
    model = workload.shared_copy()

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x)
        return result

    # Dynamo keeps its graphs by code object: one of its own for every value.
    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    compiled = torch.compile(own, fullgraph=True, dynamic=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        with (
            functorch_config.patch(activation_memory_budget=1.0 if value is None else value),
            inductor_config.patch(fallback_random=eager_draws),
        ):
            result: torch.Tensor = compiled(x)
            return result

    return run


class Contenders:
    """Everything that takes a network's step in one precision, with its peak and its distance from a reference."""

    def __init__(self, workload: Workload, precision: str) -> None:
        self.workload, self.precision = workload, precision
        self.forwards: dict[str, Forward] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self._buffers = workload.buffers()
        eager = in_precision(workload.shared_copy(), precision)
        self.peak_bytes = workload.peak_bytes(eager)
        found = self._taken(eager)
        self._draws = any(isinstance(m, _DropoutNd) and m.p > 0 for m in workload.model.modules())
        self._reference = _in_float64(workload)
        self.forwards[EAGER] = eager
        self.rows[EAGER] = {"measured_peak_bytes": self.peak_bytes, **errors_of(found, self._reference)}
        self._most_error = most_error(precision, self.rows[EAGER]["error"])

    def _taken(self, forward: Forward) -> dict[str, torch.Tensor]:
        self.workload.restore(self._buffers)
        self.workload.reset()
        self.workload.step(forward)
        return self.workload.gradients()

    def add_inductor(self, name: str, value: float | None) -> None:
        """Add `torch.compile`, however far its gradients are from the reference.

        Its own masks are not the reference's, so where masks are drawn its gradients are those that it computes of
        eager's, and not known where it cannot be compiled to draw these.
        """
        call = self._added(name, by_inductor(self.workload, value))
        if self._draws:
            call = in_precision(by_inductor(self.workload, value, eager_draws=True), self.precision)
        try:
            found: dict[str, Any] = {**self._errors(call)}
        except InductorError as error:
            found = {"unchecked": str(error).splitlines()[0]}
        self.rows[name] |= {**found, "activation_memory_budget": value}

    def add_ours(self, name: str, forward: Forward, **more: Any) -> None:
        """Add a model of ours.

        Raises:
            WrongResult: its gradients are too far from the reference.
        """
        errors = self._errors(self._added(name, forward))
        if not errors["error"] <= self._most_error:
            raise WrongResult(f"{self.workload.name}, {name}: gradients are off by {errors['error']:.2g} of their size")
        self.rows[name] |= {**errors, **more}

    def _added(self, name: str, forward: Forward) -> Forward:
        """Take two steps, then meter one."""
        call = in_precision(forward, self.precision)
        self._taken(call)
        self._taken(call)
        self.forwards[name] = call
        self.rows[name] = {"measured_peak_bytes": self.workload.peak_bytes(call)}
        return call

    def _errors(self, call: Forward) -> dict[str, float]:
        return errors_of(self._taken(call), self._reference)


def most_error(precision: str, eager_error: float) -> float:
    """How far gradients may be from the reference: twice as far as eager PyTorch's are.

    >>> most_error("float32", 0.004), most_error("float32", 0.03)
    (0.02, 0.06)
    """
    return max(_MOST_ERROR[precision], 2 * eager_error)


def _in_float64(workload: Workload) -> dict[str, torch.Tensor]:
    """Eager PyTorch's gradients in float64: on the CPU, of the masks that it draws in every precision."""
    images = workload.images.double() if workload.images.is_floating_point() else workload.images
    exact = replace(workload, model=copy.deepcopy(workload.model).double(), images=images)
    exact.reset()
    exact.step(exact.model)
    return exact.gradients()


def errors_of(found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Distance of gradients from a reference, relative to its size.

    Returns:
        `error` of all parameters together; `median_error` and `largest_error` of each by itself, but for those whose
        gradient is zero but for rounding, as a bias's before a batch norm is.
    """
    squares = []
    for key, value in reference.items():
        off = float((found[key].double() - value.double()).square().sum())
        squares.append((off, float(value.double().square().sum())))
    whole = sum(size for _, size in squares)
    each = [math.sqrt(off / size) for off, size in squares if size > _NEXT_TO_NOTHING * whole]
    return {
        "error": math.sqrt(sum(off for off, _ in squares) / whole),
        "median_error": statistics.median(each),
        "largest_error": max(each),
    }


def measure_network(
    name: str,
    setting: Setting,
    shares: Sequence[float],
    precision: str,
    values: Sequence[float],
    rounds: int,
    seed: int,
    allow: str | None = None,
    advance: Callable[[str], None] = lambda what: None,
    clock: Clock = time.perf_counter,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Every contender at every budget, as plain values; `keep` gets what there is after each contender and round."""
    advance("eager PyTorch")
    workload = workload_of(name, setting, seed)
    found = Contenders(workload, precision)
    refused: dict[str, str] = {}
    result = {
        "network": name,
        "setting": asdict(setting),
        "precision": precision,
        "allow": allow,
        "plain_peak_bytes": found.peak_bytes,
        "reference": "float64",
        "contenders": found.rows,
        "refused": refused,
        "complete": False,
    }
    for value in (None, *values):
        who = INDUCTOR if value is None else f"{INDUCTOR} at {value:g}"
        advance(who)
        found.add_inductor(who, value)
        keep(result)
    for share in shares:
        budget_bytes = int(found.peak_bytes * share / 100)
        for ours in OURS:
            who = f"{ours} at {share:g} %"
            advance(who)
            try:
                model = compile_model(
                    workload.shared_copy(),
                    budget_bytes,
                    allow=allow,
                    name=name,
                    options=Options(kernels=ours.split()[1]),
                )
                found.add_ours(who, model, budget_bytes=budget_bytes, share=share)
            except BudgetError as error:
                refused[who] = str(error).split(";")[0]
                continue
            status: Any = model.shoal
            found.rows[who] |= {
                "predicted_peak_bytes": status.predicted_peak_bytes,
                "predicted_seconds": status.plan.predicted_seconds,
                "repairs": status.repairs,
                "preparing_seconds": sum(one.seconds for one in status.preparations),
                "variant": str(status.plan.variant),
                "compiled": list(status.plan.compiled),
            }
            keep(result)
    advance(f"timing {len(found.forwards)} contenders in turns")
    for row in found.rows.values():
        row["seconds"] = []
    for who, counts in turns(list(found.forwards), rounds, 1):
        seconds = workload.seconds(found.forwards[who], clock)
        if counts:
            found.rows[who]["seconds"].append(seconds)
        if counts and len({len(row["seconds"]) for row in found.rows.values()}) == 1:
            keep(result)
    return {**result, "complete": True}
