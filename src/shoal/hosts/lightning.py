"""Lightning: a callback by which a LightningModule, or a part of it, trains inside a byte budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.core.sizes import format_bytes
from shoal.engine.api import compile
from shoal.engine.status import Status
from shoal.errors import BudgetError, InputError
from shoal.memory.budget import budget_bytes


class ShoalBudget(Callback):
    """Train inside `budget` device bytes, with the optimizer that Lightning makes counted from the start.

    It replaces `shoal.compile` by hand, which comes before there is an optimizer. What is compiled is the call of the
    module, `self(x)` in its `training_step`, or of one part of it. What `model.shoal.metrics()` tells goes to the
    trainer's loggers whenever it changes, such as `shoal/measured_peak_bytes`. To Lightning's batch-size finder, a
    batch that no plan fits is out of memory: `Tuner.scale_batch_size` and `BatchSizeFinder` find the largest one inside
    the budget.

    Args:
        budget: device bytes at the peak of a step, as for `shoal.compile`.
        part: the name of the submodule to compile, as in `named_modules`; "" for the whole module.
        arguments: further arguments of `shoal.compile`, without `optimizer`.

    Raises:
        InputError: `optimizer` is among the arguments. When training starts: there is no such part; or the strategy
            (ddp and its like) calls the whole module in a way of its own. After the first batch: `training_step` never
            called what was compiled.
        BudgetError: as `shoal.compile`.

    Example:
        >>> import lightning as L
        >>> class Model(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        ...
        ...     def forward(self, x):
        ...         return self.net(x)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).square().mean()
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), 0.1)
        >>> quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
        >>> trainer = L.Trainer(max_steps=2, callbacks=[ShoalBudget("2MiB")], enable_model_summary=False, **quiet)
        >>> model = Model()
        >>> trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 3, 16, 16), batch_size=4))
        >>> model.shoal.measured_peak_bytes <= model.shoal.budget_bytes
        True

    Known limits: with more than one optimizer, none is counted before it has stepped.
    """

    def __init__(self, budget: int | str, part: str = "", **arguments: Any) -> None:
        if "optimizer" in arguments:
            raise InputError("optimizer= is what Lightning makes in configure_optimizers; leave it out")
        self._budget, self._part, self._arguments = budget, part, arguments
        self._compiled: nn.Module | None = None
        self._logged: dict[str, int | float] = {}
        self._batches = 0

    @property
    def status(self) -> Status | None:
        """`shoal` of what was compiled; None before training starts."""
        return None if self._compiled is None else self._compiled.shoal  # type: ignore[return-value]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Get ready for a batch-size finder, which runs steps before any callback is told of a start."""
        if stage == "fit":
            self._compiled, self._logged, self._batches = None, {}, 0
            pl_module.training_step = self._in_trials(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile, unless a finder has run steps already."""
        self._compile(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module's own step again."""
        self._put_back(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what has changed; see whether the step was planned at all."""
        status = self.status
        assert status is not None
        self._batches += 1
        if self._batches == 2 and not status.planning_seconds:  # a model of several graphs is planned after one step
            called = f"self.{self._part}(...)" if self._part else "self(...)"
            raise InputError(
                f"training_step of {type(pl_module).__name__} never called {called}, which the budget is for; give "
                "ShoalBudget the part= that it calls"
            )
        found = status.metrics()
        if found != self._logged:
            self._logged = found
            for logger in trainer.loggers:
                logger.log_metrics(found, trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The module's own step again, where training never started."""
        self._put_back(pl_module)

    def _compile(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._compiled is not None:
            return
        try:
            part = pl_module.get_submodule(self._part)
        except AttributeError as error:
            raise InputError(f"part={self._part!r}: {error}; expected a name of named_modules()") from None
        if part is pl_module and trainer.strategy.model is not pl_module:
            raise InputError(
                f"{type(trainer.strategy).__name__} runs training_step inside the module's call, which cannot be "
                "planned; give ShoalBudget the part= of the module to compile"
            )
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        allowed_bytes = budget_bytes(self._budget, trainer.strategy.root_device)
        self._compiled = compile(part, allowed_bytes, optimizer=optimizer, **self._arguments)

    def _in_trials(self, trainer: Trainer, pl_module: LightningModule) -> Callable[..., Any]:
        """The training step while a finder may run it: a batch over the budget is one that Lightning halves."""
        step = pl_module.training_step

        @functools.wraps(step)
        def trial(*args: Any, **kwargs: Any) -> Any:
            self._compile(trainer, pl_module)
            try:
                return step(*args, **kwargs)
            except BudgetError as error:
                if self in trainer.callbacks or _batch_size(args, kwargs) <= 1:  # a finder takes all callbacks away
                    raise
                needed = error.least_feasible_bytes or 0
                raise torch.OutOfMemoryError(
                    f"no plan for this batch fits {format_bytes(error.budget_bytes)}, it needs {format_bytes(needed)}: "
                    "in the words that Lightning's finder looks for, CUDA out of memory"
                ) from error

        return trial

    def _put_back(self, pl_module: LightningModule) -> None:
        vars(pl_module).pop("training_step", None)


def _batch_size(*arguments: Any) -> int:
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next((len(tensor) for tensor in tensors), 0)
