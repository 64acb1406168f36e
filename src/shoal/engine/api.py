"""`shoal.compile`: a model that trains inside a byte budget."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from shoal.capture.dynamo import (
    OWN_BUDGET,
    GraphBreak,
    ModelRaised,
    TooManyCaptures,
    capturing,
    drawn_for,
    forget_sizes,
    global_hooks,
    logging_functions,
    one_graph,
    plain_call,
    settings,
)
from shoal.capture.traced_functions import admit_cumulative_norms, admit_fake_quantization
from shoal.core import arguments
from shoal.core.joined_step import is_joined
from shoal.core.plan import Plan
from shoal.core.progress import doing, preparing
from shoal.core.step import StepGraph
from shoal.engine import memory_warnings
from shoal.engine.backend import compile_step
from shoal.engine.compile_options import CompileOptions
from shoal.engine.early_gradients import EarlyGradients
from shoal.engine.eval_steps import EvalSteps
from shoal.engine.iteration.first import CallsBefore
from shoal.engine.iteration.run import Iterations
from shoal.engine.model_call import ModelCall, raise_as_plain, reject_function_transforms
from shoal.engine.model_refusals import reject_compiled, reject_hopeless
from shoal.engine.options import Options, name_of, options_of
from shoal.engine.repair import run_again_where_repaired
from shoal.engine.reserved_budget import grow_segments
from shoal.engine.session import Session
from shoal.engine.set_up import SetUp, has_tensor_attributes
from shoal.engine.shared_budget import Budget
from shoal.engine.snapshot import Snapshot
from shoal.engine.status import Status
from shoal.engine.tensor_subclass import call_as_function, subclass_among
from shoal.engine.unreplicated import Unreplicated
from shoal.errors import BudgetError, CaptureError, ShoalError
from shoal.lowlevel.torch_state import active_ddp_module, in_trace, is_exporting
from shoal.memory import reads
from shoal.memory.budget import budget_bytes
from shoal.memory.optimizer_state import declared_optimizer, reject_copy
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import reject_without_shape
from shoal.offload.policy import AUTO

log = logging.getLogger("shoal")
Module = TypeVar("Module", bound=nn.Module)


def compile(
    model: Module,
    budget: int | str | Budget | None = None,
    *,
    optimizer: torch.optim.Optimizer | str | None = None,
    allow: str | Collection[str] | None = None,
    offload_to: str | Path | None = AUTO,
    options: Options | None = None,
    name: str | None = None,
) -> Module:
    """Make `model` train inside `budget` device bytes; then train as always.

    It replaces `torch.compile(model)`, `torch.utils.checkpoint` by hand and guessing at batch sizes. The model is
    changed in place, as by `model.compile()`: parameters, buffers, hooks, `state_dict` and the function that it
    computes stay. The first training step is captured, profiled and planned; the first steps are measured, and planned
    again if one exceeds the budget. In eval mode and under `torch.no_grad()` the model runs as without Shoal.

    Args:
        model: the network, of one graph or several with eager code between them. With distributed data parallel, the
            model before it is wrapped or the wrapper; the budget is each rank's.
        budget: device bytes at the peak of a step, with parameters, gradients, optimizer state, buffers, the batch and
            workspaces: an int or a text such as "2GiB"; "auto" for what the device has left, less 5 %; "80%" of its
            memory; or a `shoal.Budget` that several models share. None (default): SHOAL_BUDGET of the environment; if
            that is not set, everything is kept and the peak is only reported.
        optimizer: the optimizer that will train the model, so that its state counts before its first step, or the name
            of one, such as "adamw" (`shoal.memory.optimizer_state.NAMES`).
        allow: the techniques that a plan may use, a text with commas or a collection. Sets: "keep" (none), "bitwise"
            (PyTorch's bits: recompute, offload, order, pieces), "exact" (the same function to rounding: bitwise, fuse,
            direct, exact_split), "lossy" (all: exact, encode, invert, split). None (default): SHOAL_ALLOW of the
            environment, else "exact" ("bitwise" for planners other than "joint"). docs/explain/variants.md describes
            each.
        offload_to: where saved tensors may be offloaded to: "host" (pinned memory on CUDA), a folder on a local disk
            (CPU only), or None for nowhere. "auto" (default): "host" on CUDA, None on the CPU.
        options: everything else; see `shoal.Options`.
        name: the model's name in tables and errors; by default its class.

    Returns:
        `model` itself. After the first step `model.shoal` has `plan`, `budget_bytes`, `predicted_peak_bytes`,
        `measured_peak_bytes`, `planning_seconds` and `lower_bound_seconds`.

    Raises:
        InputError: an argument is none of what is listed above, or the model is compiled already.
        BudgetError: here, if parameters and buffers exceed the budget; at the first training step, before anything
            runs, if no plan fits.
        CaptureError: at a training step, if nothing of the model that trains can be captured.
        PlanError: at the first training step, if a given plan, or that of a planner of your own, cannot run.

    Example:
        >>> import shoal
        >>> block = lambda: [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        >>> model = nn.Sequential(*block(), *block(), *block(), nn.Flatten(), nn.Linear(8192, 10))
        >>> model = shoal.compile(model, budget="1600KiB")  # of 1.9 MiB
        >>> model(torch.randn(4, 8, 32, 32)).square().mean().backward()
        >>> model.shoal.budget_bytes, model.shoal.measured_peak_bytes <= model.shoal.budget_bytes
        (1638400, True)

    Known limits: a copy of the model (`copy.deepcopy`, pickle, `AveragedModel`) trains without a plan until it is
    compiled itself; logging in the forward pass is left out of planned steps; gradients of gradients, `torch.func`
    transforms and modules' backward hooks are refused. Inputs of other sizes share one more plan, made for twice the
    largest seen, or for what `torch._dynamo.mark_dynamic(x, dim, max=...)` declares.
    """
    arguments.instance("model", model, nn.Module)
    network: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    reject_compiled(network)
    asked, named = options_of(options), name_of(name, network)
    if isinstance(budget, Budget):
        budget.add(model, declared_optimizer(optimizer), allow, offload_to, asked, named)
        return model
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    resolved = CompileOptions.of(
        budget=budget_bytes(budget, device, of_environment=asked.plan is None),
        allow=allow,
        offload_to=offload_to,
        options=asked,
    )
    resolved.check_device(device.type)
    declared = declared_optimizer(optimizer)
    reject_copy(declared, network.parameters())
    leaves = resolved.offloading(device.type)
    status = Status(resolved.budget_bytes, budget_of=resolved.budget_of)
    status.describes(network, _under_plan, resolved.lossy)
    status.expandable_segments = grow_segments(device, resolved)
    session = Session(status, resolved, StaticMemory(network, declared), named, asked.plan, leaves)
    weakref.finalize(network, session.let_go)  # Dynamo keeps the compiled code for good, and the session with it
    if status.budget_bytes is not None:
        reject_without_shape(network)
        reject_hopeless(network, session)
        session.check_optimizer_step()
    caller = _Caller(network, session, strict=asked.strict)
    forget = weakref.WeakMethod(caller.forget)
    session.on_repair = lambda: (method := forget()) and method()
    caller.install(network, model, status=status)
    object.__setattr__(network, "_replicate_for_data_parallel", Unreplicated(network))
    return model


def _under_plan(model: nn.Module, plan: Plan) -> nn.Module:
    return compile(model, offload_to=None, options=Options(plan=plan))


class _Caller(ModelCall):
    """Stands in for the model's call: training steps run planned, everything else as it was.

    Gradients that are there when a step starts (accumulation) take room, so such steps have plans of their own. In a
    function that is compiled around the model, a training step runs outside of Dynamo's graphs.
    """

    def __init__(self, model: nn.Module, session: Session, *, strict: bool = False) -> None:
        super().__init__(model)
        self.session = session
        self._strict = strict
        ready = session.ready_plan
        self._plan_is_joined = ready is not None and isinstance(ready.graph, StepGraph) and is_joined(ready.graph)
        self._may_break = not strict and (ready is None or self._plan_is_joined)
        self._iterations: Iterations | None = None
        self._before_first: SetUp | None = None  # how the model was before it broke at its first call
        self._planned: dict[Any, Callable[..., Any]] = {}
        self._too_many_beside: set[int] = set()  # calls that are left over, for which no plan fits
        self._logging: Collection[Callable[..., Any]] = ()
        self._eval_steps = EvalSteps(session)
        forget_sizes(model)

    def forget(self) -> None:
        """Plan again from the next step on."""
        self._planned.clear()
        self._too_many_beside.clear()
        if self._iterations is not None:
            self._iterations.forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if not (model.training and torch.is_grad_enabled()) or is_exporting():
            outputs = plain_call(model, *args, **kwargs)
            self._eval_steps.watch(outputs)
            return outputs
        return self.train(*args, **kwargs)

    @torch.compiler.disable(reason=OWN_BUDGET)  # type: ignore[untyped-decorator]
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """A training step, planned."""
        if in_trace():
            return plain_call(self.model, *args, **kwargs)
        with reads.paused():  # within another model's step: what this one reads counts in its own budget
            return self._train_here(args, kwargs)

    def _train_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self.model
        if (subclass := subclass_among(args, kwargs)) is not None:
            return call_as_function(subclass, self.train, args, kwargs)
        reject_function_transforms()
        session = self.session
        wrapper = active_ddp_module()
        session.static.called_by(wrapper)
        if self._iterations is None and self._plan_is_joined:
            self._iterations = self._new_iterations()
        if self._iterations is None and self._is_of_an_iteration((args, kwargs)):
            self._iterations = self._new_iterations(before=self._calls_before())
        accumulating = session.before_call()
        session.early = EarlyGradients.of(wrapper, added=accumulating)
        session.static.hook_is_metered = session.early.sent
        kind = accumulating, session.early, *global_hooks()
        try:
            budget_bytes = session.status.budget_bytes
            if session.left_over and budget_bytes is not None:
                return self._train_beside(session.left_over, budget_bytes, kind, args, kwargs)
            if wrapper is not None or not session.status.runs_again:  # other ranks would not run it again
                return self._train(kind, args, kwargs)
            return run_again_where_repaired(model, session.status, lambda: self._train(kind, args, kwargs))
        except TooManyCaptures as reached:
            session.start_over(reached)
            return self._train(kind, args, kwargs)

    def _train_beside(
        self, n_calls: int, budget_bytes: int, kind: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A step while calls wait whose backward passes may never come, as of a batch that the loop skips. Where it
        does not fit beside them, it has a plan of its own; where there is none, it is over the budget, and says so."""
        session = self.session
        peak_bytes = session.bytes_beside_calls(n_calls)
        if peak_bytes > budget_bytes and n_calls not in self._too_many_beside:
            try:
                with session.beside_calls(n_calls):
                    return self._train((*kind, n_calls), args, kwargs)
            except BudgetError:
                self._planned.pop((*kind, n_calls), None)
                memory_warnings.left_over(session.name, n_calls, peak_bytes)
                self._too_many_beside.add(n_calls)
        return self._train(kind, args, kwargs)

    def _train(self, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        model = self.model
        if self._is_set_up():
            return self._train_as_one(kind, args, kwargs)
        if kind not in self._planned:
            self._logging = logging_functions()
            admit_cumulative_norms(model)
            admit_fake_quantization(model)
        try:
            with settings(self._logging), one_graph():
                if self._iterations is not None:
                    drawn = drawn_for(model, args)
                    strict, kwargs = self._strict or bool(drawn), {**kwargs, **drawn}
                    return self._iterations.call(self.session.name, self._planned, kind, args, kwargs, strict=strict)
                return self._call_planned(kind, args, {**kwargs, **drawn_for(model, args)})
        except (GraphBreak, ModelRaised) as failure:
            why = failure.with_traceback(None)
        return self._train_otherwise(why, kind, args, kwargs)

    def _call_planned(self, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model of one graph, captured if it is not."""
        model, status, planned = self.model, self.session.status, self._planned.get(kind)
        captures = status.captures
        if planned is not None:
            outputs = planned(*args, **kwargs)
        else:
            name, record = self.session.name, status.prepared
            with preparing(name, why=self._why(kind), record=record):
                doing("capture")
                planned = self._planned[kind] = capturing(model, self._backend(), name, record)
                outputs = planned(*args, **kwargs)
        if status.captures > captures and has_tensor_attributes(model):
            gc.collect()  # cycles of Dynamo's hold those that the call has replaced
        return outputs

    def _train_otherwise(
        self, why: GraphBreak | ModelRaised, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A call that cannot be captured as one graph: as several, where it is no mistake of the caller's."""
        model, session = self.model, self.session
        if isinstance(why, ModelRaised):
            raise_as_plain(model, why, args, kwargs)
        if admit_cumulative_norms(model):  # averaging of weights has set them so in the midst of training
            return self._train(kind, args, kwargs)
        if why.may_be_an_error:
            before = Snapshot(model)
            with torch.no_grad():
                plain_call(model, *args, **kwargs)  # raises as the plain model does, or there is more to the break
            before.restore()
        if not self._may_break or drawn_for(model, args):
            raise why
        for asked, option in (
            (session.options.budget_of == "reserved", "budget_of='reserved'"),
            (session.options.cuda_graphs, "cuda_graphs=True"),
        ):
            if asked:
                raise CaptureError(
                    f"{option} needs a model of one graph; {session.name} breaks: {why.reason} at {why.place}"
                )
        self._before_first = SetUp(model)
        self._iterations = self._new_iterations(broken=f"{why.place}: {why.reason}")
        return self._begin_in_several(self._iterations, why, kind, args, kwargs)

    def _is_of_an_iteration(self, given: Any) -> bool:
        """Whether the call comes before the backward passes of calls before it, or backward passes have run twice: what
        is held meanwhile is known to an iteration only. Else those calls are left over, as of a batch that the loop has
        skipped."""
        session, calls = self.session, self.session.metering.calls
        if not session.may_be_iteration:
            return False
        if calls.again or not calls.under_way():
            return calls.again
        return not calls.went_back or calls.overlapped > 1 or calls.lead_to(tree_leaves(given))

    def _calls_before(self) -> CallsBefore | None:
        """The calls that wait for backward passes; what runs the model from here on goes on with them."""
        calls, plans = self.session.metering.calls, self.session.end_plans()
        return CallsBefore(calls, plans, calls.under_way(), calls.number) if calls.under_way() else None

    def _new_iterations(self, *, broken: str = "", before: CallsBefore | None = None) -> Iterations:
        model, session = self.model, self.session
        self._planned.clear()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        models: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary({session.name: model})
        if before is not None:
            memory_warnings.calls_come_together(session.name, reserved=session.options.budget_of == "reserved")
        return Iterations(session, device, models, shared=False, broken=broken, before=before)

    def _begin_in_several(
        self, iterations: Iterations, why: GraphBreak, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The first step of several graphs. Where it has set the model up, it begins again: the model may be one graph.

        A budget that is named for one graph is then one in which the first step runs, too. Where the model raises, as
        by a mistaken call, the next call tells whether it is one graph.
        """
        before = Snapshot(self.model)
        outputs = error = None
        try:
            with settings(self._logging), one_graph():
                outputs = iterations.call(self.session.name, self._planned, kind, args, kwargs)
        except BudgetError as refused:
            error = refused.with_traceback(None)
        except (ShoalError, torch.OutOfMemoryError):  # the next call keeps less
            self._say_that_it_breaks(why)
            raise
        except Exception:
            self.session.as_one_graph()
            self._iterations = self._before_first = None
            self._planned.clear()
            raise
        # In a wrapper that exchanges tensors other ranks may not run it again.
        is_wrapped = active_ddp_module() is not None or self.session.static.is_sharded
        if not self._has_set_itself_up() or (error is None and is_wrapped):
            self._say_that_it_breaks(why)
            if error is not None:
                raise error
            return outputs
        self._before_first = outputs = None
        gc.collect()  # the results, and frames of a traceback, hold what the forward pass has saved
        before.restore()
        return self._train_as_one(kind, args, kwargs)

    def _say_that_it_breaks(self, why: GraphBreak) -> None:
        session = self.session
        log.warning(
            "%s is not one graph: %s at %s; its graphs are planned as one step, and what crosses between them is "
            "kept (model.shoal.plan.explain() tells where it breaks; shoal.Options(strict=True) refuses)",
            session.name,
            why.reason,
            why.place,
        )

    def _is_set_up(self) -> bool:
        """Whether an earlier call, at which the model broke, has set it up, so that the next may be one graph."""
        iterations = self._iterations
        if self._before_first is None or iterations is None or not iterations.is_between_steps():
            return False
        is_set_up, self._before_first = self._has_set_itself_up(), None
        return is_set_up

    def _has_set_itself_up(self) -> bool:
        """Whether a call has changed how the model is set up since it broke."""
        return self._before_first is not None and self._before_first != SetUp(self.model)

    def _train_as_one(self, kind: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A step of a model that was several graphs when it set itself up, and may be one now."""
        session, iterations, captured = self.session, self._iterations, dict(self._planned)
        before = session.as_one_graph()
        self._iterations, self._may_break = None, False
        self._planned.clear()
        try:
            outputs = self._train(kind, args, kwargs)
        except GraphBreak:
            session.as_several_again(before)
            self._iterations = iterations
            self._planned.update(captured)
            return self._train(kind, args, kwargs)
        finally:
            self._may_break = True
        log.warning(
            "%s is one graph since its first call, in which it set itself up; from here on it is planned as one",
            session.name,
        )
        return outputs

    def _why(self, kind: tuple[Any, ...]) -> str:
        """Why the model is captured again although nothing of what it is called with has changed; "" the first time."""
        if not self._planned:
            return "it is planned again" if self.session.status.preparations else ""
        if self.session.left_over:
            return "a call before it waits for a backward pass"
        return "there are gradients before the step" if kind[0] else "hooks, gradients or their exchange have changed"

    def _backend(self) -> Callable[..., Any]:
        session = self.session  # Dynamo keeps backends for good: this one must not hold the model

        def shoal(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            return compile_step(session, gm, example_inputs)

        return shoal
