"""Runs one network of `bench.fuzz` in plain PyTorch, under `aot_eager` and in Shoal, and says what differs.

The judges share nothing with Shoal: tensors are compared bit by bit with plain PyTorch, `torch.compile` and float64,
and the peak is counted from PyTorch's own profiler's memory events, not by Shoal's meter.
"""

from __future__ import annotations

import linecache
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from types import ModuleType
from typing import Any

import torch

import shoal
from bench import fuzz_step
from bench.fuzz_networks import Network, render
from examples.planners import NAMES
from shoal import planners
from shoal.errors import BudgetError, ShoalError

EAGER_ONLY = "eager only"  # torch.compile(backend="aot_eager") differs in the same way
DIFFERS, ROUNDING = "differs", "rounding"
UNCLEAR = "unclear"  # no further from float64 than plain PyTorch, and `aot_eager` fails or draws other noise
OVER_BUDGET, OVER_PREDICTION = "over budget", "over prediction"
LEAST, CRASH, REFUSED, REPAIRED = "least", "crash", "refused", "repaired"
OURS = (DIFFERS, ROUNDING, OVER_BUDGET, OVER_PREDICTION, LEAST, CRASH)

BUDGETS = ("plain", "between", "least")
RESIDENCES = ("device", "host", "file")
_OFFLOADING = tuple(name for short, name in NAMES.items() if short != "sqrt")  # these have no plan without a link
_PREDICTED_WITHIN = 1.02  # the contract
_SLACK_BYTES = 256  # scalars of the loss
_ERROR_FACTOR, _ERROR_TOLERANCE = 2.0, {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}
_NUDGES = 8  # of the batch, where rounding grows
_IN_PLACE_DROPOUT = re.compile(r"(F\.dropout\(x, [\d.]+), inplace=True\)")
_MAX_TRIES = 5
_NOT_SEARCHED = r"alone need .*?\((\d+) bytes\).* was not searched for"  # a budget of so many has it searched for
_NO_REFERENCE = 0.3  # where eager PyTorch itself is that far from float64, random ops drew otherwise there
_NEAR_EAGER = 1e-4  # and what "exact" gives is held against eager PyTorch: float32's rounding, over some layers
_OF_LARGEST = 0.1  # a gradient that is zero but for rounding is held against the size of the others


@dataclass(frozen=True, order=True)
class Setting:
    """How Shoal is asked to train: a planner, one of `BUDGETS`, one of `RESIDENCES`, what is allowed."""

    planner: str
    budget: str
    residence: str
    allow: str = "exact"

    def share(self, seed: int) -> float:
        """Where "between" lies for the network of that seed: 0 for the minimum, 1 for plain PyTorch's peak.

        >>> 0 < Setting("joint", "between", "host").share(3) < 1
        True
        """
        return Random(f"{seed} {self.planner} {self.residence}").random()


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        kind: one of the constants of this module.
        what: what differs, the same for the same cause as far as can be seen: findings are counted by it.
        details: the figures.
        setting: under which it was found.
    """

    kind: str
    what: str
    details: str
    setting: Setting

    @property
    def ours(self) -> bool:
        return self.kind in OURS


@dataclass(frozen=True)
class Ran:
    """One training under Shoal: the budget it ran in, its highest counted peak, and what was predicted."""

    setting: Setting
    budget_bytes: int
    peak_bytes: int
    predicted_bytes: int
    repairs: int


def settings(allow: str = "exact") -> list[Setting]:
    """Every setting there is, under `allow`.

    >>> len(settings())
    60
    """
    return [
        Setting(planner, budget, residence, allow)
        for planner in (*planners.NAMES, *NAMES.values())
        for budget in BUDGETS
        for residence in RESIDENCES
        if residence != "device" or planner not in _OFFLOADING
    ]


def load(text: str, name: str = "network.py") -> dict[str, Any]:
    """The namespace of a rendered network."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # errors quote its lines
    module = sys.modules["network"] = ModuleType("network")  # Dynamo imports the module that a class says it is of
    exec(compile(text, name, "exec"), module.__dict__)
    return module.__dict__


class NotANetwork(Exception):
    """Plain PyTorch cannot train it."""


class Comparison:
    """What plain PyTorch and `aot_eager` make of one network, for any number of settings to be held against.

    Args:
        network: what to train.
        stage: called with what is about to run, for whoever must know where a process died.

    Raises:
        NotANetwork: plain PyTorch cannot train it, or not twice in the same way.
    """

    def __init__(self, network: Network, stage: Callable[[str], None] = lambda what: None) -> None:
        self.network, self.stage = network, stage
        self.namespace = load(render(network))
        stage("plain")
        try:
            self.eager, self.course, self.peak_bytes = self._plain()
            again, _, _ = self._plain()
        except (RuntimeError, ValueError) as error:
            raise NotANetwork(_first_line(error)) from None
        if wrong := fuzz_step.differences(self.eager, again):
            raise NotANetwork(f"plain PyTorch does not repeat itself: {wrong[:3]}")

    @property
    def aot(self) -> dict[str, torch.Tensor]:
        """What `aot_eager` leaves behind, empty where it fails; asked for where Shoal differs from plain PyTorch."""
        return self._aot_eager[0]

    @property
    def aot_error(self) -> str | None:
        """Why `aot_eager` fails, if it does."""
        return self._aot_eager[1]

    def _plain(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
        model = self.namespace["build"]()
        found, course, peaks = fuzz_step.train(
            model, fuzz_step.optimizer_of(model), self.namespace, predicted=lambda: 0, metered=True
        )
        return found, course, max(peak for peak, _ in peaks)

    @cached_property
    def _aot_eager(self) -> tuple[dict[str, torch.Tensor], str | None]:
        self.stage("aot_eager")
        torch._dynamo.reset()
        # In place, `aot_eager` draws another mask; this is the same function.
        module = sys.modules["network"]
        namespace = load(_IN_PLACE_DROPOUT.sub(r"\1)", render(self.network)), "reference.py")
        model = namespace["build"]()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        try:
            found, _, _ = fuzz_step.train(compiled, fuzz_step.optimizer_of(model), namespace, self.course)
        except Exception as error:
            return {}, _failure(error)
        finally:
            sys.modules["network"] = module
        return found, None

    @cached_property
    def exact(self) -> dict[str, torch.Tensor]:
        """The same steps in float64; empty where the network's text names a dtype."""
        model = self.namespace["build"]().double()
        batch = self.namespace["batch"]

        def double(step: int) -> torch.Tensor:
            x = batch(step)
            return x.detach().double().requires_grad_(x.requires_grad)

        namespace = self.namespace | {"batch": double}
        try:
            return fuzz_step.train(model, fuzz_step.optimizer_of(model), namespace, self.course)[0]
        except RuntimeError:
            return {}

    @cached_property
    def _nudged(self) -> list[dict[str, torch.Tensor]]:
        """What plain PyTorch makes of batches that differ in their last bits: how far rounding grows here."""
        batch, found = self.namespace["batch"], []
        for seed in range(_NUDGES):
            chance = torch.Generator().manual_seed(seed)

            def nudged(step: int, chance: torch.Generator = chance) -> torch.Tensor:
                x = batch(step)
                eps = torch.finfo(x.dtype).eps * torch.randint(-1, 2, x.shape, generator=chance)
                return (x.detach() * (1 + eps.to(x.dtype))).requires_grad_(x.requires_grad)

            model = self.namespace["build"]()
            namespace = self.namespace | {"batch": nudged}
            found.append(fuzz_step.train(model, fuzz_step.optimizer_of(model), namespace, self.course)[0])
        return found

    def findings(self, setting: Setting) -> tuple[list[Finding], list[Ran]]:
        """Train under Shoal and hold it against the others. "least" is asked for as a user would: by giving too little
        and typing what is named; "between" is drawn from there to plain PyTorch's peak."""
        self.stage(str(setting))
        found: list[Finding] = []
        if setting.budget == "plain":
            trained = self._trained(setting, self.peak_bytes, found)
            return found, self._judge(trained, found)
        least = self._trained(replace(setting, budget="least"), 1, found)
        ran = self._judge(least, found)
        if setting.budget == "between" and least is not None and least.budget_bytes < self.peak_bytes:
            more_bytes = setting.share(self.network.seed) * (self.peak_bytes - least.budget_bytes)
            ran += self._judge(self._trained(setting, least.budget_bytes + int(more_bytes), found), found)
        return found, ran

    def _trained(self, setting: Setting, budget_bytes: int, found: list[Finding]) -> Attempt | None:
        """A training inside `budget_bytes`, or inside the least that is named where they do not do."""
        asked_bytes, named = budget_bytes, ""
        for _ in range(_MAX_TRIES):
            attempt = self._attempt(setting, budget_bytes)
            error = attempt.error
            if not isinstance(error, BudgetError):
                break
            if needed := re.search(_NOT_SEARCHED, str(error)):
                budget_bytes, named = int(needed[1]), ""
                continue
            after = " after a repair" if attempt.repairs else " at the first step" if attempt.began else " at once"
            least_bytes = error.least_feasible_bytes
            if named:
                details = f"{budget_bytes} named{named}, then refused{after}: {least_bytes} named"
                found.append(Finding(LEAST, f"least named{named} is refused{after}", details, setting))
            elif attempt.repairs:
                details = f"{budget_bytes} planned, then {least_bytes} named"
                found.append(Finding(LEAST, f"a budget was planned for, then refused{after}", details, setting))
            elif budget_bytes == self.peak_bytes and (least_bytes or 0) > _PREDICTED_WITHIN * budget_bytes:
                details = f"{self.peak_bytes} refused, {least_bytes} named"
                found.append(Finding(REFUSED, "what plain PyTorch takes", details, setting))
            named = after if least_bytes is not None else ""
            budget_bytes = least_bytes if least_bytes is not None else 2 * budget_bytes + self._least_possible_bytes
        else:
            details = f"{asked_bytes} asked, {budget_bytes} named last"
            found.append(Finding(LEAST, "no named budget is feasible", details, setting))
            return None
        if error is None:
            return attempt
        if isinstance(error, ShoalError):
            found.append(Finding(REFUSED, _kind_of(error), _failure(error), setting))
        elif self.aot_error is not None:
            found.append(Finding(EAGER_ONLY, "it cannot be compiled", f"{self.aot_error}; {_failure(error)}", setting))
        else:
            found.append(Finding(CRASH, _kind_of(error), _failure(error), setting))
        return None

    @property
    def _least_possible_bytes(self) -> int:
        """Parameters, gradients and momenta."""
        return 3 * sum(p.numel() * p.element_size() for p in self.namespace["build"]().parameters())

    def _attempt(self, setting: Setting, budget_bytes: int) -> Attempt:
        torch._dynamo.reset()
        model = self.namespace["build"]()
        optimizer = fuzz_step.optimizer_of(model)
        began = False
        try:
            offload_to = {"device": None, "host": "host", "file": tempfile.gettempdir()}[setting.residence]
            options = shoal.Options(planner=setting.planner)
            shoal.compile(
                model, budget_bytes, optimizer=optimizer, allow=setting.allow, offload_to=offload_to, options=options
            )
            began = True
            trace, _, peaks = fuzz_step.train(
                model,
                optimizer,
                self.namespace,
                self.course,
                predicted=lambda: model.shoal.predicted_peak_bytes,
                metered=True,
            )
            return Attempt(setting, budget_bytes, trace, peaks, model.shoal.repairs, began)
        except Exception as error:
            repairs = model.shoal.repairs if began else 0
            return Attempt(setting, budget_bytes, {}, [], repairs, began, error.with_traceback(None))

    def _judge(self, attempt: Attempt | None, found: list[Finding]) -> list[Ran]:
        if attempt is None:
            return []
        setting = attempt.setting
        wrong = fuzz_step.differences(attempt.trace, self.eager)
        ours = [name for name in wrong if not self._is_pytorchs(name, attempt.trace.get(name))]
        alike = [name for name in wrong if name not in ours]
        if alike:
            found.append(Finding(EAGER_ONLY, _quantities(alike, self.eager), ", ".join(alike[:3]), setting))
        if ours:
            worse = [name for name in ours if not self._is_rounding(name, attempt.trace.get(name))]
            details = "; ".join(self._errors(name, attempt.trace.get(name)) for name in (worse or ours)[:3])
            is_guided = all(self._is_guided(name) for name in ours)
            kind = DIFFERS if worse else ROUNDING if is_guided else UNCLEAR
            if worse or setting.allow == "bitwise":  # what else is allowed may round otherwise
                found.append(Finding(kind, _quantities(worse or ours, self.eager), details, setting))
        ran = [Ran(setting, attempt.budget_bytes, peak, reported, attempt.repairs) for peak, reported in attempt.peaks]
        for one in ran:
            figures = f"{one.peak_bytes} measured, {one.predicted_bytes} predicted, {one.budget_bytes} budget"
            if one.peak_bytes > one.budget_bytes:  # once may be: then it is planned for again
                kind = OVER_BUDGET if one is ran[-1] else REPAIRED
                found.append(Finding(kind, "", figures, setting))
            if one.peak_bytes > _PREDICTED_WITHIN * one.predicted_bytes + _SLACK_BYTES:
                found.append(Finding(OVER_PREDICTION, "", figures, setting))
        return ran[-1:]

    def _is_pytorchs(self, name: str, ours: torch.Tensor | None) -> bool:
        """Whether `aot_eager` leaves the same; where it raises, whether it is a gradient of zeros in place of none,
        which AOTAutograd makes of what only outputs outside the loss depend on."""
        if self.aot_error is None:
            return fuzz_step.same(ours, self.aot.get(name))
        return ours is not None and name not in self.eager and " gradient of " in name and not ours.any()

    def _is_guided(self, name: str) -> bool:
        """Whether `aot_eager` took the same step, to rounding, so that it says which roundings are PyTorch's."""
        output = f"{name.split(':')[0]}: output 0"
        return self.aot_error is None and self._is_rounding(output, self.aot.get(output))

    def _is_rounding(self, name: str, ours: torch.Tensor | None) -> bool:
        """Whether what differs is as near to float64 as plain PyTorch."""
        theirs, exact = self.eager.get(name), self.exact.get(name)
        if ours is None or theirs is None or exact is None or not theirs.is_floating_point():
            return False
        if ours.dtype != theirs.dtype:
            return False
        tolerance = _ERROR_TOLERANCE[torch.bfloat16 if self.network.autocast else theirs.dtype]
        least = self._summed(name) if name.endswith(": loss") else _OF_LARGEST * self._largest(name)
        output = f"{name.split(':')[0]}: output 0"
        if fuzz_step.error(self.eager[output], self.exact[output]) > _NO_REFERENCE:
            return fuzz_step.error(ours, theirs, least) <= max(tolerance, _NEAR_EAGER)
        error, plain = fuzz_step.error(ours, exact, least), fuzz_step.error(theirs, exact, least)
        if error > _ERROR_FACTOR * plain + tolerance:  # one draw of a rounding; where it grows, others are larger
            plain = max(plain, *(fuzz_step.error(one[name], exact, least) for one in self._nudged))
        return error <= _ERROR_FACTOR * plain + tolerance

    def _largest(self, name: str) -> float:
        """The largest magnitude of anything of its kind in that step: of all gradients, say."""
        alike = name.split(" ")[:2]
        return max(fuzz_step.largest(tensor) for other, tensor in self.eager.items() if other.split(" ")[:2] == alike)

    def _summed(self, name: str) -> float:
        """The size of what the loss of that name adds up: it may cancel to nearly zero."""
        step, weights = name.split(":")[0], self.course["weights"]
        terms = (self.eager[f"{step}: output {place}"].double() * weights[place] for place in range(len(weights)))
        return sum(float(term.nan_to_num(0, 0, 0).abs().sum()) for term in terms)

    def _errors(self, name: str, ours: torch.Tensor | None) -> str:
        theirs, exact = self.eager.get(name), self.exact.get(name)
        if ours is None or theirs is None:
            return f"{name}: there in {'eager' if ours is None else 'Shoal'} only"
        if exact is None or not theirs.is_floating_point():
            return name
        aot = self.aot.get(name)
        by = {"Shoal": ours, "eager": theirs} | ({} if aot is None else {"aot_eager": aot})
        return f"{name}: error " + ", ".join(f"{fuzz_step.error(t, exact):.1e} {who}" for who, t in by.items())


@dataclass(frozen=True)
class Attempt:
    """One call of `shoal.compile` and the training after it: what it left behind, or the error that ended it.

    Attributes:
        began: whether the error, if any, came after `shoal.compile` had returned.
    """

    setting: Setting
    budget_bytes: int
    trace: dict[str, torch.Tensor]
    peaks: list[tuple[int, int]]
    repairs: int
    began: bool
    error: Exception | None = None


def _quantities(names: list[str], eager: dict[str, torch.Tensor]) -> str:
    """What kinds of things differ, for findings to be counted by.

    >>> _quantities(["0: gradient of l1.weight", "0: loss", "1: gradient of the input"], {"0: loss": torch.ones(())})
    'loss, no gradient in eager'
    """
    kinds = set()
    for name in names:
        kind = name.split(": ", 1)[1].split(" ")[0]
        kinds.add(kind if name in eager else f"no {kind} in eager")
    return ", ".join(sorted(kinds))


def _kind_of(error: Exception) -> str:
    """The error with its numbers and names taken out: the same for every network that meets the same cause."""
    text = re.sub(r"'[^']*'|\b[\w.]*\d[\w.]*\b", "_", _first_line(error))
    return f"{type(error).__name__}: {text[:90]}"


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return (str(inner).strip().splitlines() or [type(inner).__name__])[0][:300]
