"""`shoal.Budget`: one budget that several models share."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from shoal.capture.dynamo import (
    OWN_BUDGET,
    ModelRaised,
    TooManyCaptures,
    global_hooks,
    logging_functions,
    one_graph,
    plain_call,
    settings,
)
from shoal.capture.traced_functions import admit_cumulative_norms, admit_fake_quantization
from shoal.core.over_budget import over_budget
from shoal.core.sizes import format_bytes
from shoal.engine.budget_table import PersistentMemory, table
from shoal.engine.compile_options import CompileOptions
from shoal.engine.iteration.run import Iterations
from shoal.engine.model_call import ModelCall, raise_as_plain, reject_function_transforms
from shoal.engine.options import Options
from shoal.engine.session import Session
from shoal.engine.status import Status
from shoal.errors import InputError, brief
from shoal.lowlevel.torch_state import active_ddp_module, in_trace, is_exporting
from shoal.memory.budget import budget_bytes
from shoal.memory.optimizer_state import Declared, reject_copy
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import distinct_bytes, reject_without_shape
from shoal.offload.policy import AUTO

log = logging.getLogger("shoal")
_SHARED = ("planner", "kernels", "host_budget", "rehearse", "plan")  # options that all models of a budget share
_OF_EACH = ("strict",)  # those of one model
_ALONE = "has a budget of its own: give shoal.compile(model, budget=) bytes for it"


class Budget:
    """Device bytes in which several models train together: a GAN's two, a teacher and a student, two encoders.

    Give it to `shoal.compile` of each model, and train as usual. In the first iteration every graph keeps the minimum
    and is measured; from the second on, all graphs of an iteration are planned as one step inside the budget.

    An iteration is all forward and backward calls between two points with no pending backward, of any of the models.
    Models that are not trained, such as a teacher or a moving average of weights, count if they are compiled with the
    budget too. Under `torch.no_grad()` they run as without Shoal; in eval mode too, unless an argument requires a
    gradient, as for a perceptual loss.

    Args:
        budget: as for `shoal.compile`: an int of bytes, a text such as "8GiB", "auto", or "80%" of the device's memory.

    Raises:
        InputError: it is none of these, or a Budget.

    Example:
        >>> import shoal
        >>> shared = shoal.Budget("1MiB")
        >>> image = shoal.compile(nn.Linear(64, 32), budget=shared, name="image")
        >>> text = shoal.compile(nn.Linear(48, 32), budget=shared, name="text")
        >>> for _ in range(3):
        ...     loss = (image(torch.randn(8, 64)) * text(torch.randn(8, 48))).sum()
        ...     loss.backward()
        >>> shared.peak_bytes <= shared.budget_bytes, list(shared.models)
        (True, ['image', 'text'])
    """

    def __init__(self, budget: int | str) -> None:
        if isinstance(budget, Budget):
            raise InputError("budget is a shoal.Budget itself; give that one to shoal.compile, or bytes for another")
        # What depends on the device is computed once a model says which one that is.
        if budget_bytes(budget, 1 << 62) is None:
            raise InputError("a shoal.Budget needs bytes: an int, a text such as '8GiB' or '80%', or SHOAL_BUDGET")
        self._asked = budget
        self._process = os.getpid()
        self._models: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        self._steps: Iterations | None = None
        self._options: CompileOptions | None = None
        self._device = torch.device("cpu")

    @property
    def budget_bytes(self) -> int | None:
        """The bytes; None before a model is compiled with it, which says whose memory "80%" is of."""
        return None if self._options is None else self._options.budget_bytes

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The models, by name."""
        return dict(self._models)

    @property
    def status(self) -> Status | None:
        """`model.shoal` of each of them: the plans of all iterations; None before the first model."""
        return None if self._steps is None else self._steps.session.status

    @property
    def peak_bytes(self) -> int | None:
        """The highest measured use over all models, of the active plans; None before a backward pass."""
        return None if self.status is None else self.status.measured_peak_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The highest predicted peak of all iterations; None before the second iteration."""
        iterations = [] if self._steps is None else self._steps.known.values()
        return max(
            (iteration.predicted_bytes for iteration in iterations if iteration.planned is not None), default=None
        )

    def metrics(self) -> dict[str, int | float]:
        """`model.shoal.metrics()` over all models, and "shoal/NAME/persistent_bytes" of each."""
        found = {} if self.status is None else self.status.metrics()
        if (predicted_bytes := self.predicted_peak_bytes) is not None:
            found["shoal/predicted_peak_bytes"] = predicted_bytes
        return found | {f"shoal/{one.model}/persistent_bytes": one.nbytes for one in self._persistent()}

    def add(
        self,
        model: nn.Module,
        optimizer: Declared | None,
        allow: str | Collection[str] | None,
        offload_to: str | Path | None,
        asked: Options,
        name: str,
    ) -> None:
        """Take a model in; `shoal.compile` calls this.

        Args:
            model: the network.
            optimizer: that trains it.
            allow, offload_to, asked, name: `allow=`, `offload_to=`, `options=` and `name=` of `shoal.compile`.

        Raises:
            InputError: these are not the same for all, or cannot be shared.
            BudgetError: what the models hold before any activation is over the budget.
        """
        self._reject_another_process()
        if isinstance(model, DistributedDataParallel):
            raise InputError(f"a model in DistributedDataParallel {_ALONE}")
        of_one_model = [name for name in asked.given if name not in _SHARED + _OF_EACH]
        if of_one_model:
            raise InputError(f"{', '.join(of_one_model)}: not for models that share a shoal.Budget; leave it out")
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        reject_copy(optimizer, model.parameters())
        reject_without_shape(model)
        steps = self._steps
        known_bytes = budget_bytes(self._asked, device) if self.budget_bytes is None else self.budget_bytes
        options = CompileOptions.of(budget=known_bytes, allow=allow, offload_to=offload_to, options=asked)
        if steps is not None and asked.plan != steps.session.ready_plan:  # first: a plan decides what is allowed
            raise InputError("all models of a shoal.Budget run by one plan: give options=shoal.Options(plan=) of each")
        if steps is not None and (options != self._options or device != self._device):
            raise InputError(
                "all models of a shoal.Budget have the same planner=, allow=, kernels= and offload_to=, on one device: "
                f"got {_words(options, device)} where the others have {_words(self._options or options, self._device)}"
            )
        if steps is None:
            session = Session(
                Status(known_bytes), options, ready_plan=asked.plan, offloading=options.offloading(device.type)
            )
            steps = Iterations(session, device, self._models, shared=True)
            steps.metering.open()
            weakref.finalize(self, steps.close)
            self._steps, self._options, self._device = steps, options, device
        session = steps.session
        named = _unlike(name, self._models)
        self._reject_hopeless(named, model, optimizer)
        session.static.add(model, optimizer)
        self._models[named] = model
        session.name = " and ".join(self._models)
        if steps.known:
            log.warning(
                "%s: shares %s from here on with %s, which are planned again where that leaves them less",
                named,
                format_bytes(known_bytes or 0),
                " and ".join(other for other in self._models if other != named),
            )
            steps.meter_again()
        SharedCall(model, self, steps, named, strict=asked.strict).install(model, status=session.status)

    def _reject_hopeless(self, name: str, model: nn.Module, optimizer: Declared | None) -> None:
        budget_bytes = self.budget_bytes or 0
        models = {**self._models, name: model}
        lasting = [t for one in models.values() for t in (*one.parameters(), *one.buffers())]
        static = StaticMemory(model, optimizer)
        state_bytes = static.state_bytes() + (self._steps.session.static.state_bytes() if self._steps else 0)
        floor_bytes = distinct_bytes(lasting) + state_bytes  # which parameters get a gradient is not known yet
        if floor_bytes > budget_bytes:
            raise over_budget(
                " and ".join(models),
                floor_bytes,
                budget_bytes,
                is_minimum=False,
                instead="smaller models",
                details={
                    "parameters and buffers": format_bytes(distinct_bytes(lasting)),
                    "optimizer state": format_bytes(state_bytes),
                    "gradients and activations": "not counted yet",
                },
                persistent_bytes=floor_bytes,
            )

    def _reject_another_process(self) -> None:
        if os.getpid() != self._process:
            raise InputError("a shoal.Budget counts the memory of the process that made it; make one in each process")

    def _persistent(self) -> list[PersistentMemory]:
        return [] if self._steps is None else PersistentMemory.of(self._models, self._steps.session.static)

    def __str__(self) -> str:
        return table(self, self._persistent(), [] if self._steps is None else list(self._steps.known.values()))

    def __repr__(self) -> str:
        return f"shoal.Budget({self._asked!r})"

    def __copy__(self) -> NoReturn:
        raise InputError(f"{self!r} cannot be copied: what shares it would no longer be counted together")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise InputError(
            f"{self!r} cannot be copied, as options are: what shares it would no longer be counted together; give the "
            "models to shoal.compile(model, budget=) by hand"
        )

    def __reduce__(self) -> NoReturn:
        raise InputError(f"{self!r} cannot be pickled: it counts the memory of one process; make one in each")


class SharedCall(ModelCall):
    """Stands in for the call of a model that shares a budget.

    Args:
        model: the network.
        budget: it shares.
        steps: of all models of the budget.
        name: the model's.
        strict: whether it must be one graph.
    """

    def __init__(self, model: nn.Module, budget: Budget, steps: Iterations, name: str, *, strict: bool) -> None:
        super().__init__(model)
        self.budget = budget  # lives as long as a model that shares it
        self.name = name
        self._steps = steps
        self._strict = strict
        self._captured: dict[Any, Callable[..., Any]] = {}
        self._logging: Collection[Callable[..., Any]] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if is_exporting():
            return plain_call(model, *args, **kwargs)
        # In eval mode a result is sent back through the model if what it is given is trained: a perceptual loss.
        if torch.is_grad_enabled() and (model.training or _are_trained((args, kwargs))):
            return self.train(*args, **kwargs)
        if torch.compiler.is_compiling() or in_trace():
            return plain_call(model, *args, **kwargs)
        return self._steps.call_plainly(self.name, args, kwargs)

    @torch.compiler.disable(reason=OWN_BUDGET)  # type: ignore[untyped-decorator]
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """A training step, as a part of an iteration."""
        if in_trace():
            return plain_call(self.model, *args, **kwargs)
        self.budget._reject_another_process()
        reject_function_transforms()
        if active_ddp_module() is not None:
            raise InputError(f"{self.name} is called by DistributedDataParallel; a model there {_ALONE}")
        try:
            return self._call(args, kwargs)
        except TooManyCaptures as reached:
            self._steps.session.start_over(reached)
            return self._call(args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kind = self._steps.accumulates(self.name), *global_hooks()
        if not self._captured:
            self._logging = logging_functions()
            admit_cumulative_norms(self.model)
            admit_fake_quantization(self.model)
        try:
            with settings(self._logging), one_graph():
                return self._steps.call(self.name, self._captured, kind, args, kwargs, strict=self._strict)
        except ModelRaised as failure:
            raised = failure
        raise_as_plain(self.model, raised, args, kwargs)


def reject_member(model: nn.Module) -> None:
    """Raise InputError for a model that shares a budget already."""
    call = model._compiled_call_impl
    if isinstance(call, SharedCall) and call.model is model:
        raise InputError(f"{call.name} is in {call.budget!r} already; a model has one budget: compile a copy of it")


def _are_trained(given: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(given))


def _unlike(name: str, names: Collection[str]) -> str:
    found, number = name, 2
    while found in names:
        found, number = f"{name} {number}", number + 1
    return found


def _words(options: CompileOptions, device: torch.device) -> str:
    planner = options.planner if isinstance(options.planner, str) else brief(options.planner)
    offload_to = "" if options.offload.to == AUTO else f", offload_to={options.offload.to!r}"
    allowed = ",".join(sorted(options.means))
    return f"planner={planner}, allow={allowed}, kernels={options.kernels}{offload_to} on {device}"
