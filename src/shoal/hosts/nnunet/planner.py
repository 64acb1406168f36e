"""Experiment planners of nnU-Net whose estimate is Shoal's plan: `-pl nnUNetPlannerShoal`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
from nnunetv2.experiment_planning.experiment_planners.resencUNet_planner import ResEncUNetPlanner
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
from nnunetv2.utilities.label_handling.label_handling import LabelManager
from torch import nn

from shoal.core import presets
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.fit import fit
from shoal.engine.plan import plan
from shoal.errors import BudgetError
from shoal.hosts.nnunet.step import NetworkAndLoss, allowed

_FAR = 1.15  # an expected least above that many budgets is not planned
_CARDS = ("rtx-3060-12gb", "rtx-4090-24gb", "a100-40gb", "h100-80gb")  # by memory


class ShoalPlanning:
    """Stands before a planner of nnU-Net: a patch fits where Shoal plans a step of it inside the memory target.

    nnU-Net's own search goes on as it does, from the median shape down, and so does its topology; only its estimate is
    replaced by `shoal.plan` of network and loss, two samples (or the least that nnU-Net takes), with deep supervision,
    autocast and the state of SGD. Nothing is run. The batch is the largest that fits, within nnU-Net's share of the
    data set. What nnU-Net's own estimate chooses is also printed, and noted in the plans file.

    SHOAL_HARDWARE of the environment names the preset whose rates count, by default the smallest card that has the
    target's bytes; "cpu" plans float32 for this machine, on which ops are timed. SHOAL_ALLOW is what plans may use.

    Attributes:
        target_gb: the memory target where -gpu_memory_target is not given, of 10^9 bytes to the GB: what is left of a
            card's 2^30 is for CUDA's context and its allocator.
        plans_name: of the plans file where -overwrite_plans_name is not given.
    """

    target_gb: float = 8
    plans_name = "nnUNetShoalPlans"
    covers_all = False

    def __init__(
        self,
        dataset_name_or_id: str | int,
        gpu_memory_target_in_gb: float | None = None,
        preprocessor_name: str = "DefaultPreprocessor",
        plans_name: str | None = None,
        overwrite_target_spacing: Sequence[float] | None = None,
        suppress_transpose: bool = False,
    ) -> None:
        target = self.target_gb if gpu_memory_target_in_gb is None else gpu_memory_target_in_gb
        named = plans_name or self.plans_name
        super().__init__(  # type: ignore[call-arg]
            dataset_name_or_id, target, preprocessor_name, named, overwrite_target_spacing, suppress_transpose
        )
        if self.covers_all:  # as nnU-Net's M, L and XL
            self.max_dataset_covered: float = 1
        self._budget_bytes = round(target * 1e9)
        self._steps: dict[Any, Plan] = {}
        self._least: dict[int, tuple[int, int]] = {}  # by dimensions: voxels of a patch, its least bytes
        self._by_nnunet = False

    def generate_data_identifier(self, configuration_name: str) -> str:
        """Preprocessed data do not depend on patch and batch: those of nnU-Net's own plans, where they are the same."""
        if configuration_name in ("2d", "3d_fullres"):
            return f"nnUNetPlans_{configuration_name}"
        return f"{self.plans_identifier}_{configuration_name}"  # type: ignore[attr-defined]

    def get_plans_for_configuration(
        self,
        spacing: Any,
        median_shape: Any,
        data_identifier: str,
        approximate_n_voxels_dataset: float,
        _cache: dict[str, Any],
    ) -> dict[str, Any]:
        """As nnU-Net does, by Shoal's plans."""
        planner: Any = self
        arguments = (spacing, median_shape, data_identifier, approximate_n_voxels_dataset)
        self._by_nnunet = True
        own = super().get_plans_for_configuration(*arguments, {})  # type: ignore[misc]
        self._by_nnunet = False
        names = [f"UNet_reference_val_{dims}d" for dims in (2, 3)]
        names += [f"UNet_reference_val_corresp_bs_{dims}d" for dims in (2, 3)] + ["UNet_reference_val_corresp_GB"]
        kept = {name: getattr(planner, name) for name in names}
        least_batch = planner.UNet_min_batch_size
        targets = (self._budget_bytes, self._budget_bytes, least_batch, least_batch, planner.UNet_vram_target_GB)
        vars(planner).update(zip(names, targets, strict=True))
        try:
            found = super().get_plans_for_configuration(*arguments, _cache)  # type: ignore[misc]
        finally:
            vars(planner).update(kept)
        patch, architecture = tuple(map(int, found["patch_size"])), found["architecture"]
        of_network = (
            architecture["network_class_name"],
            architecture["arch_kwargs"],
            architecture["_kw_requires_import"],
        )
        covered = round(approximate_n_voxels_dataset * planner.max_dataset_covered / prod(patch))
        most = max(covered, least_batch)
        batch, made = least_batch, self._plan(patch, least_batch, *of_network)
        if most > batch:
            model = self._model(patch, *of_network)
            largest = fit(
                model,
                lambda n: self._example(patch, n, of_network[1]),
                self._budget_bytes,
                first=batch,
                max_batch=most,
                **self._how(),
            )
            batch, made = max(largest.batch, batch), largest.plan if largest.batch >= batch else made
        found["batch_size"] = batch
        found["shoal"] = {
            "budget_bytes": self._budget_bytes,
            "predicted_peak_bytes": made.predicted_peak_bytes,
            "plain_peak_bytes": made.plain_peak_bytes,
            "predicted_seconds": made.predicted_seconds,
            "plain_seconds": made.plain_seconds,
            "hardware": made.hardware,
            "nnunet_patch_size": [int(side) for side in own["patch_size"]],
            "nnunet_batch_size": int(own["batch_size"]),
        }
        print(
            f"Shoal: {len(patch)}d, patch {list(patch)}, batch {batch} inside {format_bytes(self._budget_bytes)}: peak "
            f"{format_bytes(made.predicted_peak_bytes)}, step {1e3 * made.predicted_seconds:.0f} ms, {made.hardware}; "
            f"plain PyTorch would need {format_bytes(made.plain_peak_bytes)}. nnU-Net's estimate chooses patch "
            f"{found['shoal']['nnunet_patch_size']}, batch {own['batch_size']}"
        )
        return found

    def static_estimate_VRAM_usage(
        self,
        patch_size: Sequence[int],
        input_channels: int,
        output_channels: int,
        arch_class_name: str,
        arch_kwargs: dict[str, Any],
        arch_kwargs_req_import: Sequence[str],
    ) -> float:
        """Bytes of the step: at most the memory target where a plan fits.

        Raises:
            BudgetError: no patch at all fits.
        """
        of_network = (arch_class_name, arch_kwargs, arch_kwargs_req_import)
        if self._by_nnunet:
            return super().static_estimate_VRAM_usage(  # type: ignore[misc]
                patch_size, input_channels, output_channels, *of_network
            )
        patch = tuple(map(int, patch_size))
        voxels, planner = prod(patch), self
        if len(patch) in self._least:
            known_voxels, known_bytes = self._least[len(patch)]
            expected = known_bytes * voxels / known_voxels  # weights are few compared with what a patch takes
            if expected > _FAR * self._budget_bytes:
                return expected
        try:
            return planner._plan(patch, self.UNet_min_batch_size, *of_network).predicted_peak_bytes  # type: ignore[attr-defined]
        except BudgetError as error:
            if all(side < 4 * self.UNet_featuremap_min_edge_length for side in patch):  # type: ignore[attr-defined]
                smallest = "x".join(map(str, patch))
                raise error.with_detail("smallest patch tried", f"{smallest}; give -gpu_memory_target more") from None
            least_bytes = error.least_feasible_bytes or 2 * self._budget_bytes
            self._least[len(patch)] = (voxels, least_bytes)
            return max(least_bytes, self._budget_bytes + 1)

    def _plan(self, patch: tuple[int, ...], batch: int, *of_network: Any) -> Plan:
        key = (patch, batch, str(of_network))
        if key not in self._steps:
            model, example = self._model(patch, *of_network), self._example(patch, batch, of_network[1])
            self._steps[key] = plan(model, example, self._budget_bytes, **self._how())
        return self._steps[key]

    def _how(self) -> dict[str, Any]:
        return {
            "hardware": None if self._is_here else self._preset,
            "optimizer": "sgd-momentum",
            "allow": allowed(),
            "name": type(self).__name__,
        }

    @property
    def _is_here(self) -> bool:
        return os.environ.get("SHOAL_HARDWARE") == "cpu"

    @property
    def _preset(self) -> str:
        holds = (name for name in _CARDS if presets.get(name).device.memory_bytes >= self._budget_bytes)
        return os.environ.get("SHOAL_HARDWARE") or next(holds, _CARDS[-1])

    @property
    def _labels(self) -> LabelManager:
        described = self.dataset_json  # type: ignore[attr-defined]
        return LabelManager(described["labels"], described.get("regions_class_order"))

    def _model(self, patch: tuple[int, ...], class_name: str, arguments: dict[str, Any], imports: Any) -> nn.Module:
        described = self.dataset_json  # type: ignore[attr-defined]
        channels = len(described.get("channel_names") or described["modality"])
        network = get_network_from_plans(
            class_name,
            arguments,
            imports,
            channels,
            self._labels.num_segmentation_heads,
            allow_init=False,
            deep_supervision=True,
        )
        scales = self._scales(arguments)
        trainer = SimpleNamespace(
            label_manager=self._labels,
            configuration_manager=SimpleNamespace(batch_dice=True),
            is_ddp=False,
            enable_deep_supervision=True,
            _do_i_compile=lambda: False,
            _get_deep_supervision_scales=lambda: scales,
        )
        return NetworkAndLoss(network, nnUNetTrainer._build_loss(trainer), half=not self._is_here)

    def _example(self, patch: tuple[int, ...], batch: int, arguments: dict[str, Any]) -> tuple[Any, ...]:
        described, labels = self.dataset_json, self._labels  # type: ignore[attr-defined]
        channels = len(described.get("channel_names") or described["modality"])
        n_maps = len(labels.foreground_regions) + labels.has_ignore_label if labels.has_regions else 1
        dtype = torch.bool if labels.has_regions else torch.int16
        sides = [
            tuple(round(side * part) for side, part in zip(patch, scale, strict=True))
            for scale in self._scales(arguments)
        ]
        targets = [torch.empty(batch, n_maps, *one, dtype=dtype) for one in sides]
        return torch.empty(batch, channels, *patch), targets

    @staticmethod
    def _scales(arguments: dict[str, Any]) -> list[list[float]]:
        return [list(scale) for scale in 1 / np.cumprod(np.vstack(arguments["strides"]), axis=0)][:-1]


class nnUNetPlannerShoal(ShoalPlanning, ExperimentPlanner):
    """nnU-Net's default network, patch and batch by Shoal's plans for 8 GB; see `ShoalPlanning`."""


class nnUNetPlannerShoalResEncM(ShoalPlanning, ResEncUNetPlanner):
    """The residual encoder U-Net for 8 GB, as nnU-Net's preset M."""

    plans_name = "nnUNetShoalResEncUNetMPlans"
    covers_all = True


class nnUNetPlannerShoalResEncL(ShoalPlanning, ResEncUNetPlanner):
    """The residual encoder U-Net for 24 GB, as nnU-Net's preset L."""

    target_gb = 24
    plans_name = "nnUNetShoalResEncUNetLPlans"
    covers_all = True


class nnUNetPlannerShoalResEncXL(ShoalPlanning, ResEncUNetPlanner):
    """The residual encoder U-Net for 40 GB, as nnU-Net's preset XL."""

    target_gb = 40
    plans_name = "nnUNetShoalResEncUNetXLPlans"
    covers_all = True
