"""`model.shoal`: the plans of a compiled model, and what was measured under them."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.capture.call_arguments import Example
from shoal.core.added_time import added_text
from shoal.core.columns import aligned
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.progress import STAGES, Preparation
from shoal.core.sizes import format_bytes
from shoal.core.step import Storage
from shoal.core.variant import Variant
from shoal.core.version import __version__
from shoal.engine.iteration.metered import Measured
from shoal.engine.lossy_report import Loss, LossyReport, lossy_report
from shoal.engine.options import Options, options_of
from shoal.errors import InputError
from shoal.transforms.split.split import SplitModule

_RESIDENCES = ("kept", "recomputed", "offloaded", "encoded")
_COLUMNS = ("input", "static", "predicted peak", "step ms", "added ms", *_RESIDENCES, "computed")


@dataclass(repr=False)
class Status:
    """The plans of a compiled model, and what was measured under them; `model.shoal`. Printed, it is a summary.

    Attributes:
        budget_bytes: the budget. None: everything is kept and the peak is only reported.
        budget_of: what it bounds, "allocated" or "reserved" bytes.
        plans: every plan in force: of the first shape, of all other shapes up to a largest one where sizes can be
            symbols, else of each; and as many more where gradients are there before the step. Empty while plans
            are made again; `plan` and the peaks are those of the last plans until then.
        measured_peak_bytes: highest measured use of any metered step of the plans; None before the first. Until the
            plans of several graphs have run, that of the iterations before them.
        first_peak_bytes: of several graphs, highest measured use of the iterations that ran before there was a plan
            for them; 0 if there was none.
        reserved_peak_bytes: on CUDA, most that the allocator had reserved of the device in a metered step, for all that
            the process does; None on the CPU, and before the first.
        predicted_reserved_bytes: on CUDA, what the allocator is predicted to reserve in a step: under
            `budget_of="reserved"` from the first step on, else once blocks lie at planned addresses; None before.
        graph_bytes: what the CUDA graphs of a step keep of the device, once `cuda_graphs=True` has recorded them.
        expandable_segments: whether CUDA's allocator cuts its blocks to size; None on the CPU, and without a budget.
        planning_seconds: capture, profiling and planning of all plans, repairs included.
        captures: how often the model was captured: for a shape, for all shapes up to one, or again.
        repairs: how often plans were made again because a measured peak was over the budget.
        encoded: by step, the storages that its plan encodes. They depend on times measured here; what an earlier run
            encoded, put here before the first step, is encoded again, so that the run continues with the same numbers.
        variants: by the shapes of the inputs, the variant in which the step is computed; likewise.
        preparations: how each step was prepared, and why again, in order.
        has_new_plans: a weak reference to what tells whether the next step may be metered.
        learn_refusals: one to what plans again where memory ran out, which nothing else reports.
    """

    budget_bytes: int | None
    plans: tuple[Plan, ...] = ()
    measured_peak_bytes: int | None = None
    first_peak_bytes: int = 0
    reserved_peak_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    budget_of: str = "allocated"
    graph_bytes: int | None = None
    expandable_segments: bool | None = None
    planning_seconds: float = 0.0
    captures: int = 0
    repairs: int = 0
    encoded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    variants: dict[str, Variant] = field(default_factory=dict)
    preparations: list[Preparation] = field(default_factory=list, compare=False)
    _is_of_plans: bool = field(default=False, repr=False, compare=False)  # what was measured
    _last: tuple[Plan, ...] = field(default=(), repr=False, compare=False)  # that were in force before `plans`
    _model: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    _compiled: Callable[[nn.Module, Plan], nn.Module] | None = field(default=None, repr=False, compare=False)
    _lossy: LossyOptions | None = field(default=None, repr=False, compare=False)
    has_new_plans: Callable[[], Callable[[], bool] | None] | None = field(default=None, repr=False, compare=False)
    learn_refusals: Callable[[], Callable[[], None] | None] | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """None: a copy of the model trains without a plan, and so it has no status."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None, as a copy: plans are made again where a saved model is compiled."""
        return type(None), ()

    def __repr__(self) -> str:
        return f"<shoal: {len(self.plans)} plans, {_size(self.budget_bytes, 'no budget')}>"

    def __str__(self) -> str:
        plan = self.plan
        if plan is None:
            return f"{_size(self.budget_bytes, 'no budget')}; no training step has been planned yet"
        predicted = self.predicted_peak_bytes or 0
        share = f", {predicted / self.budget_bytes:.1%} of the budget".replace("%", " %") if self.budget_bytes else ""
        slower = added_text(plan.predicted_seconds, plan.plain_seconds)
        by_stage = {stage: self.stage_seconds(stage) for stage in STAGES}
        lines = [
            plan.graph.model or "model",
            f"budget          {_size(self.budget_bytes, 'none')}",
            f"predicted peak  {format_bytes(predicted)}{share}; plain PyTorch {plan.plain_peak}",
            f"measured peak   {_size(self.measured_peak_bytes, 'no step was measured yet')}",
            *self._first(),
            *([f"reserved peak   {self._reserved()}"] if self.reserved_peak_bytes is not None else []),
            *([f"CUDA graphs     two, which keep {format_bytes(self.graph_bytes)}"] if self.graph_bytes else []),
            f"predicted step  {_milliseconds(plan.predicted_seconds)}, {slower} of plain PyTorch's "
            f"{_milliseconds(plan.plain_seconds)}",
            f"computed        {plan.variant}",
            *([f"order           {plan.order}"] if plan.order else []),
            *([f"breaks          {'; '.join(plan.breaks)}"] if plan.breaks else []),
            *(f"allowed         {line}" for line in plan.without_effect),
            f"repairs         {self.repairs or 'none'}",
            f"prepared in     {sum(by_stage.values()):.1f} s: "
            + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in by_stage.items() if seconds),
            *(f"  again in {one.seconds:.1f} s: {one.why}" for one in self.preparations if one.why),
        ]
        lines += aligned([_COLUMNS, *(_row(each) for each in self.plans or self._last)])
        return "\n".join(lines)

    def _first(self) -> list[str]:
        if self.first_peak_bytes <= (self.measured_peak_bytes or 0):
            return []
        return [f"before plans    {format_bytes(self.first_peak_bytes)}, in the first iteration of several graphs"]

    def _reserved(self) -> str:
        how = "blocks cut to size (expandable_segments)" if self.expandable_segments else "blocks not cut to size"
        predicted = (
            f", predicted {format_bytes(self.predicted_reserved_bytes)}" if self.predicted_reserved_bytes else ""
        )
        bounds = "; the budget bounds it" if self.budget_of == "reserved" else ""
        measured = format_bytes(self.reserved_peak_bytes or 0)
        return f"{measured} of the device, by the whole process{predicted}{bounds}; {how}"

    def put(self, plans: tuple[Plan, ...]) -> None:
        """Let these plans be in force."""
        self._last, self.plans = self.plans or self._last, plans

    def note(self, measured: Measured) -> None:
        """Note what a metered step took."""
        self.measured_peak_bytes = max(self.measured_peak_bytes or 0, measured.peak_bytes)
        if measured.reserved_bytes:
            self.reserved_peak_bytes = max(self.reserved_peak_bytes or 0, measured.reserved_bytes)

    def note_iteration(self, peak_bytes: int, *, runs_planned: bool) -> None:
        """Note what a metered iteration of several graphs took so far.

        Args:
            peak_bytes: the most.
            runs_planned: whether it runs under a plan of all its graphs.
        """
        if not runs_planned:
            self.first_peak_bytes = max(self.first_peak_bytes, peak_bytes)
        elif not self._is_of_plans:
            self.measured_peak_bytes, self._is_of_plans = None, True
        if runs_planned or not self._is_of_plans:
            self.measured_peak_bytes = max(self.measured_peak_bytes or 0, peak_bytes)

    def prepared(self, preparation: Preparation) -> None:
        """Note how a step was prepared."""
        self.preparations.append(preparation)

    def stage_seconds(self, stage: str) -> float:
        """The seconds of one stage of `shoal.core.progress.STAGES`, over all preparations."""
        return sum(preparation.stages.get(stage, 0.0) for preparation in self.preparations)

    def metrics(self) -> dict[str, int | float]:
        """The figures as one flat dictionary, for TensorBoard, Weights & Biases and others; in bytes and seconds.

        What is not known yet is left out, such as everything of a plan before the first training step. Of several plans
        it is the largest step's.

        Returns:
            "shoal/budget_bytes"; "shoal/predicted_peak_bytes" and "shoal/measured_peak_bytes", the highest of all
            plans; on CUDA "shoal/reserved_peak_bytes", what the allocator then held of the device, and
            "shoal/predicted_reserved_bytes", and "shoal/graph_bytes" of CUDA graphs;
            "shoal/plain_peak_bytes" and "shoal/plain_seconds", plain PyTorch's predicted step;
            "shoal/predicted_seconds", "shoal/added_seconds", and "shoal/lower_bound_seconds" of what is added;
            "shoal/kept_bytes", "shoal/recomputed_bytes", "shoal/offloaded_bytes" and "shoal/encoded_bytes" of saved
            storages; how many "shoal/plans" are in force, how often a step was prepared ("shoal/preparations") and
            planned again because it was over the budget ("shoal/repairs"); "shoal/planning_seconds", and by stage
            "shoal/capture_seconds", "shoal/profile_seconds", "shoal/plan_seconds" and "shoal/first_run_seconds".

        Example:
            >>> import shoal
            >>> model = shoal.compile(nn.Linear(8, 8), budget="1MiB")
            >>> model(torch.randn(2, 8)).sum().backward()
            >>> found = model.shoal.metrics()
            >>> found["shoal/budget_bytes"], found["shoal/measured_peak_bytes"] <= found["shoal/predicted_peak_bytes"]
            (1048576, True)
        """
        plan = self.plan
        found: dict[str, int | float | None] = {
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "predicted_reserved_bytes": self.predicted_reserved_bytes,
            "graph_bytes": self.graph_bytes,
            "plans": len(self.plans),
            "preparations": len(self.preparations),
            "repairs": self.repairs,
            "planning_seconds": self.planning_seconds,
            **{f"{stage.replace(' ', '_')}_seconds": self.stage_seconds(stage) for stage in STAGES},
        }
        if plan is not None:
            found |= {
                "plain_peak_bytes": plan.plain_peak_bytes,
                "plain_seconds": plan.plain_seconds,
                "predicted_seconds": plan.predicted_seconds,
                "added_seconds": plan.added_seconds,
                "lower_bound_seconds": plan.least_added_seconds,
                **{f"{name}_bytes": _bytes(getattr(plan, name)) for name in _RESIDENCES},
            }
        return {f"shoal/{name}": value for name, value in found.items() if value is not None}

    def report(
        self,
        path: str | Path,
        *,
        losses: Iterable[float] = (),
        accuracies: Iterable[float] = (),
        title: str = "",
        settings: Mapping[str, Any] | None = None,
        outcome: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
    ) -> Path:
        """Write the page that `shoal train` writes: the memory over the step, its peak, the largest storages, losses.

        Args:
            path: of the HTML file, which needs nothing else; an earlier one is replaced.
            losses: one for each training step, for a curve.
            accuracies: in 0..1, one for each evaluation, for a curve.
            title: of the page; by default the model's name.
            settings, outcome: what else to show, by name: learning rate, test accuracy.
            plan: the step to show; by default the largest.

        Returns:
            The path.

        Raises:
            InputError: no training step was planned yet, or the file cannot be written.

        Example:
            >>> import shoal
            >>> model = shoal.compile(nn.Linear(8, 8), budget="1MiB")
            >>> loss = model(torch.randn(2, 8)).square().mean()
            >>> loss.backward()
            >>> model.shoal.report("run.html", losses=[loss.item()], settings={"lr": 0.1}).name
            'run.html'
        """
        shown = plan or self.plan
        if shown is None:
            raise InputError("there is nothing to report yet; take a training step first")
        from shoal.report import Report, save_html  # what draws a page is imported once one is drawn

        model = None if self._model is None else self._model()
        images = next((storage.shape for storage in shown.graph.storages if storage.kind == "input"), ())
        patches = model.patch_map(images[2:]) if isinstance(model, SplitModule) and images else None
        about = {"input": _input(shown), "shoal": __version__, "torch": torch.__version__}
        about |= {"python": platform.python_version(), "threads": str(torch.get_num_threads())}
        return save_html(
            Report(
                shown.timeline,
                shown,
                self.measured_peak_bytes,
                tuple(float(loss) for loss in losses),
                tuple(float(accuracy) for accuracy in accuracies),
                title,
                about | {name: str(value) for name, value in (settings or {}).items()},
                {name: str(value) for name, value in (outcome or {}).items()},
                patches,
            ),
            path,
        )

    def describes(
        self, model: nn.Module, compiled: Callable[[nn.Module, Plan], nn.Module], lossy: LossyOptions | None
    ) -> None:
        """Tell whose status this is, how a copy of it runs under a plan, and what may be encoded."""
        self._model, self._compiled, self._lossy = weakref.ref(model), compiled, lossy

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest step so far; None before the first training step. Where plans are made again, it is
        the last one until the next is made."""
        plans = self.plans or self._last
        largest = _largest(plans)
        if largest is None or not largest.is_at_most:
            return largest
        # One that was made for these sizes, not for all up to them, is what steps of these sizes run by.
        exact = (plan for plan in plans if not plan.is_at_most and _input(plan) == _input(largest))
        return _largest(exact) or largest

    @property
    def runs_again(self) -> bool:
        """Whether a step that runs out of a CUDA device's memory is planned and run again: while its plan is new."""
        model = None if self._model is None else self._model()
        has_new_plans = None if self.has_new_plans is None else self.has_new_plans()
        if model is None or has_new_plans is None or not has_new_plans():
            return False
        return any(parameter.device.type == "cuda" for parameter in model.parameters())

    def note_refusals(self) -> None:
        """Have the next step planned again where memory ran out in this one."""
        learn = None if self.learn_refusals is None else self.learn_refusals()
        if learn is not None:
            learn()

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The highest predicted peak of the plans; None before the first training step, as of `plan`."""
        return max((plan.predicted_peak_bytes for plan in self.plans or self._last), default=None)

    @property
    def lower_bound_seconds(self) -> float | None:
        """No plan of the largest step inside the budget adds less time than this to plain PyTorch's, in its variant and
        order of ops: negative where that variant is faster.
        """
        return self.plan.least_added_seconds if self.plan else None

    def lossy_report(
        self, example: Example, options: Options | None = None, *, loss: Loss | None = None, plan: Plan | None = None
    ) -> LossyReport:
        """Train one step on one batch twice, exactly and with encoded convolution inputs, and compare the gradients.

        Copies of the model run; the model stays as it is.

        Args:
            example: the batch, real numbers of it, as `example` of `shoal.plan`.
            options: the codec, as for `shoal.compile`; None for the one that the model was compiled with.
            loss: outputs → a scalar; by default the mean of their squares.
            plan: encode what this plan encodes, in its codec, such as `model.shoal.plan`. By default everything that
                may be encoded is.

        Returns:
            A `LossyReport`: `explain()` for people, `to_json()` for later.

        Raises:
            InputError: an argument is none of what is listed above; or the model is gone.
            CaptureError: the model is not one graph.

        Example:
            >>> import shoal
            >>> model = shoal.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
            >>> report = model.shoal.lossy_report(torch.randn(4, 3, 16, 16))
            >>> 0 < report.largest_error < 0.05
            True
        """
        model = None if self._model is None else self._model()
        if model is None or self._compiled is None:
            raise InputError("this status is of no model that is still there; compile one with shoal.compile")
        lossy = self._lossy or Options().encoding if options is None else options_of(options).encoding
        return lossy_report(model, example, lossy, compiled=self._compiled, loss=loss, plan=plan)


def _largest(plans: Iterable[Plan]) -> Plan | None:
    return max(plans, key=lambda plan: plan.plain_peak_bytes, default=None)


def _row(plan: Plan) -> tuple[str, ...]:
    residences = (getattr(plan, name) for name in _RESIDENCES)
    return (
        f"up to {_input(plan)}" if plan.is_at_most else _input(plan),
        format_bytes(plan.graph.resident_bytes),
        format_bytes(plan.predicted_peak_bytes),
        f"{1e3 * plan.predicted_seconds:.1f}",
        f"{1e3 * plan.added_seconds:+.1f}",
        *(f"{len(storages)}: {format_bytes(_bytes(storages))}" if storages else "-" for storages in residences),
        str(plan.variant),
    )


def _input(plan: Plan) -> str:
    shapes = (storage.shape for storage in plan.graph.storages if storage.kind == "input")
    return ", ".join(" x ".join(map(str, shape)) or "a number" for shape in shapes) or "none"


def _bytes(storages: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _size(nbytes: int | None, otherwise: str) -> str:
    return otherwise if nbytes is None else format_bytes(nbytes)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
