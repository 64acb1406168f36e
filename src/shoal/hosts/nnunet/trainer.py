"""A trainer of nnU-Net that trains inside a byte budget: `nnUNetv2_train ... -tr nnUNetTrainerShoal`."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn

from shoal.core.sizes import format_bytes
from shoal.engine.api import compile
from shoal.engine.options import Options
from shoal.engine.status import Status
from shoal.errors import InputError
from shoal.hosts.nnunet.step import NetworkAndLoss, allowed

_COMPILE, _YES = "nnUNet_compile", ("true", "1", "t")  # as nnU-Net reads it


class ShoalTraining:
    """Plans the training step of the nnU-Net trainer that it stands before, network and loss together.

    It replaces `torch.compile` there. Everything else is that trainer's: data, augmentation, autocast and gradient
    scaler, optimizer, checkpoints, `--c`. Validation runs the network as it is. The budget is SHOAL_BUDGET of the
    environment; where that is not set, what the plans file was planned for by one of Shoal's planners; else the memory
    target of the planner that made it, of 10^9 bytes to the GB. What plans may use is SHOAL_ALLOW, by default
    "recompute,order,pieces": the bits of plain nnU-Net. Where nnUNet_compile=1 is set and the device is CUDA, the
    regions of the step are compiled by Inductor.

    For a trainer of your own: `class Mine(ShoalTraining, nnUNetTrainerNoMirroring): ...`.

    Raises:
        InputError: on more than one GPU; or the plans file tells no memory target.
        BudgetError: at the first iteration, before it runs, where no plan fits.
    """

    _planned: nn.Module | None = None
    _reported: dict[str, int | float] | None = None

    @property
    def shoal(self) -> Status | None:
        """What `model.shoal` tells of the step; None before `initialize`."""
        return None if self._planned is None else self._planned.shoal  # type: ignore[return-value]

    def initialize(self) -> None:
        """As the trainer does; then the step is compiled."""
        trainer: Any = self
        if trainer.is_ddp:
            raise InputError(
                f"{type(self).__name__} trains on one GPU: leave out -num_gpus, or train with -tr nnUNetTrainer"
            )
        super().initialize()  # type: ignore[misc]
        budget, source = self._budget()
        self._planned = compile(
            NetworkAndLoss(trainer.network, trainer.loss),
            budget,
            optimizer=trainer.optimizer,
            allow=allowed(),
            options=Options(kernels="compiled" if self._is_compiled() else "eager"),
            name=type(trainer.network).__name__,
        )
        status = self.shoal
        assert status is not None
        assert status.budget_bytes is not None
        trainer.print_to_log_file(f"Shoal: a step inside {format_bytes(status.budget_bytes)}, {source}")

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """nnU-Net's own step, in which network and loss are one planned call."""
        trainer: Any = self
        network, loss, planned = trainer.network, trainer.loss, self._planned
        assert planned is not None
        trainer.network, trainer.loss = _HandsOn(network), planned
        try:
            return super().train_step(batch)  # type: ignore[misc]
        finally:
            trainer.network, trainer.loss = network, loss

    def on_train_epoch_end(self, train_outputs: list[dict[str, Any]]) -> None:
        """As the trainer does; what was measured goes to the log whenever it changes."""
        super().on_train_epoch_end(train_outputs)  # type: ignore[misc]
        trainer: Any = self
        status = self.shoal
        assert status is not None
        if (found := status.metrics()) != self._reported:
            self._reported = found
            trainer.print_to_log_file(str(status))

    def _do_i_compile(self) -> bool:
        return False  # the network is compiled with its loss

    def _is_compiled(self) -> bool:
        """What nnUNet_compile says, for the devices that nnU-Net compiles for."""
        asked = os.environ.get(_COMPILE, "").lower() in _YES
        return asked and bool(super()._do_i_compile())  # type: ignore[misc]

    def _budget(self) -> tuple[int | str, str]:
        trainer: Any = self
        if of_environment := os.environ.get("SHOAL_BUDGET"):
            return of_environment, "as SHOAL_BUDGET says"
        if noted := trainer.configuration_manager.configuration.get("shoal"):
            return int(noted["budget_bytes"]), "for which patch and batch were planned"
        manager = trainer.plans_manager
        name = manager.experiment_planner_name
        try:
            target = inspect.signature(manager.experiment_planner_class).parameters["gpu_memory_target_in_gb"].default
        except (AssertionError, KeyError, RuntimeError, TypeError):
            target = None
        if not isinstance(target, int | float):
            raise InputError(f"plans of {name} tell no memory target; set SHOAL_BUDGET, such as SHOAL_BUDGET=8GB")
        said = "which -gpu_memory_target may have changed: set SHOAL_BUDGET where it has"
        return round(target * 1e9), f"the {target:g} GB of {name}, {said}"


class _HandsOn:
    """Stands where the network is while nnU-Net's step runs: hands the batch on to the loss, which calls that."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class nnUNetTrainerShoal(ShoalTraining, nnUNetTrainer):
    """nnU-Net's trainer inside a byte budget; see `ShoalTraining`."""
