"""nnU-Net's own commands plan, preprocess, train, go on and validate with Shoal's planner and trainer, on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from tests.hosts import page
from tests.hosts.phantoms import write_phantoms

pytest.importorskip("nnunetv2", reason="nnU-Net is not installed: make test-nnunet")

TARGET_GB = 0.04  # plain PyTorch needs 0.046
RESULTS = "results/Dataset001_Ellipsoids/nnUNetTrainerShoalShort__nnUNetShoalPlans__3d_fullres/fold_0"
# PyPI's torchvision, which timm imports, is built for CUDA: see conftest.py.
SITE = """import torch
library = torch.library.Library("torchvision", "FRAGMENT")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
SHORT = """import os
import torch
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from shoal.hosts.nnunet.trainer import ShoalTraining

class Short(nnUNetTrainer):
    def __init__(self, plans, configuration, fold, dataset_json, device=torch.device("cuda")):
        super().__init__(plans, configuration, fold, dataset_json, device)
        self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 4, 1
        self.num_epochs = int(os.environ["EPOCHS"])

    def perform_actual_validation(self, *arguments, **settings):
        if os.environ.get("VALIDATES") != "0":
            super().perform_actual_validation(*arguments, **settings)

class nnUNetTrainerShoalShort(ShoalTraining, Short): ...
"""


class Place:
    """A folder with nnU-Net's three, and its commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            **{f"nnUNet_{name}": str(folder / name) for name in ("raw", "preprocessed", "results")},
            "nnUNet_extTrainer": str(folder / "trainers"),
            "nnUNet_n_proc_DA": "1",
            "nnUNet_def_n_proc": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(folder / "site"), os.environ.get("PYTHONPATH", ""))),
        }
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        (folder / "trainers").mkdir()
        (folder / "trainers" / "short.py").write_text(SHORT)
        write_phantoms(folder / "raw")

    def run(self, command: str, **environment: str) -> str:
        """What a command prints; its exit code has to be 0."""
        done = self.call(command, **environment)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def call(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command.split(),
            env={**self.environment, **environment},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    @property
    def plans(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.folder / "preprocessed/Dataset001_Ellipsoids/nnUNetShoalPlans.json").read_text()
        )
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Planned and preprocessed by the commands of the page."""
    found = Place(tmp_path_factory.mktemp("nnunet"))
    install, plan = page.block("nnunet.md", 0, "sh"), page.block("nnunet.md", 1, "sh")
    found.run(install.strip().splitlines()[-1].replace("python", sys.executable, 1))
    command = plan.strip().splitlines()[-1]
    assert "-gpu_memory_target 8" in command
    command = command.replace("-gpu_memory_target 8", f"-gpu_memory_target {TARGET_GB} -c 3d_fullres -np 1 -npfp 1")
    found.run(command.replace("DATASET", "1"), SHOAL_HARDWARE="cpu")
    yield found
    found.run(f"{sys.executable} -m shoal.hosts.nnunet remove")
    assert found.call("nnUNetv2_plan_experiment -d 1 -pl nnUNetPlannerShoal").returncode != 0


def test_the_planner_is_found_and_its_patch_and_batch_fit_by_shoals_plan(place: Place) -> None:
    configuration = place.plans["configurations"]["3d_fullres"]
    noted = configuration["shoal"]
    assert noted["budget_bytes"] == round(TARGET_GB * 1e9) >= noted["predicted_peak_bytes"]
    assert noted["plain_peak_bytes"] > noted["budget_bytes"]  # it does not fit without Shoal
    assert configuration["batch_size"] >= 2
    assert configuration["patch_size"] == [24, 24, 16]  # all of the volumes
    assert len(noted["nnunet_patch_size"]) == 3 and noted["nnunet_batch_size"] >= 2


@pytest.mark.timeout(3600)  # four processes of nnU-Net's: a busy machine is no reason to fail
def test_it_trains_inside_the_budget_goes_on_from_its_checkpoint_and_validates(place: Place) -> None:
    command = page.block("nnunet.md", 2, "sh").strip().splitlines()[-1]
    command = command.replace("DATASET", "1").replace("nnUNetTrainerShoal", "nnUNetTrainerShoalShort") + " -device cpu"
    first = place.run(command, EPOCHS="1", nnUNet_n_proc_DA="0")
    assert f"a step inside {round(TARGET_GB * 1e9) / 2**20:.2f} MiB, for which patch and batch were planned" in first
    said = dict(re.findall(r"^(budget|measured peak) +([\d.]+) MiB", first, re.MULTILINE))
    assert 0 < float(said["measured peak"]) <= float(said["budget"])
    assert "Mean Validation Dice" in first and (place.folder / RESULTS / "validation/summary.json").exists()

    second = place.run(f"{command} --c", EPOCHS="2", VALIDATES="0", nnUNet_n_proc_DA="0")
    assert "Epoch 1" in second and "Epoch 0" not in second
    checkpoint = torch.load(place.folder / RESULTS / "checkpoint_final.pth", weights_only=False)
    assert checkpoint["current_epoch"] == 2 and checkpoint["trainer_name"] == "nnUNetTrainerShoalShort"
    assert all("_orig_mod" not in name and "network." not in name for name in checkpoint["network_weights"])


def test_a_target_below_every_patch_is_refused_in_a_line_that_says_what_would_do(place: Place) -> None:
    done = place.call(
        "nnUNetv2_plan_experiment -d 1 -pl nnUNetPlannerShoal -gpu_memory_target 0.001 -overwrite_plans_name none",
        SHOAL_HARDWARE="rtx-3060-12gb",
    )
    assert done.returncode != 0
    assert "nnUNetPlannerShoal needs" in done.stdout and "give -gpu_memory_target more" in done.stdout


def initialized(place: Place, trainer_class: Any) -> Any:
    """A trainer of the plans on the CPU, ready for its first step."""
    plans = {**place.plans, "continue_training": False}
    described = json.loads((place.folder / "raw/Dataset001_Ellipsoids/dataset.json").read_text())
    trainer = trainer_class(plans, "3d_fullres", 0, described, device=torch.device("cpu"))
    trainer.initialize()
    return trainer


@pytest.fixture
def paths(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnU-Net's folders, in this process."""
    for name in ("raw", "preprocessed", "results"):
        monkeypatch.setenv(f"nnUNet_{name}", str(place.folder / name))


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize(
    ("asked", "device", "kernels"),
    [("1", "cuda", "compiled"), ("0", "cuda", "eager"), ("", "cuda", "eager"), ("1", "cpu", "eager")],
)
def test_nnunets_compile_switch_is_for_the_planned_graphs_where_it_compiles(
    place: Place, asked: str, device: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.hosts.nnunet import trainer as ours

    class There(ours.nnUNetTrainerShoal):
        """Decides as on another device."""

        def _is_compiled(self) -> bool:
            here, self.device = self.device, torch.device(device)
            try:
                return super()._is_compiled()
            finally:
                self.device = here

    given: dict[str, Any] = {}

    def compiled(model: nn.Module, budget: Any, **options: Any) -> nn.Module:
        given.update(options)
        return shoal.compile(model, budget, **{**options, "options": shoal.Options(kernels="eager")})

    monkeypatch.setattr(ours, "compile", compiled)
    monkeypatch.setenv("nnUNet_compile", asked)
    if not asked:
        monkeypatch.delenv("nnUNet_compile")
    trainer = initialized(place, There)
    assert given["options"].kernels == kernels
    assert not isinstance(trainer.network, torch._dynamo.OptimizedModule)  # its weights keep nnU-Net's names


def trained(place: Place, trainer_class: Any, half: bool) -> nn.Module:
    """A network after four steps of nnU-Net's `train_step` on the same batches."""
    torch.manual_seed(0)
    trainer = initialized(place, trainer_class)
    random = torch.Generator().manual_seed(1)
    scales = trainer._get_deep_supervision_scales()
    for _ in range(4):
        data = torch.randn(2, 1, 24, 24, 16, generator=random)
        sides = [[round(n * part) for n, part in zip(data.shape[2:], scale, strict=True)] for scale in scales]
        target = [torch.randint(3, (2, 1, *side), generator=random).to(torch.int16) for side in sides]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            trainer.train_step({"data": data, "target": target})
    if status := getattr(trainer, "shoal", None):
        assert status.measured_peak_bytes <= status.budget_bytes < status.plan.plain_peak_bytes
    network: nn.Module = trainer.network
    return network


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_trained_network_has_the_bits_of_plain_nnunet(
    place: Place, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    from shoal.hosts.nnunet.trainer import nnUNetTrainerShoal

    if half:
        monkeypatch.setenv("SHOAL_BUDGET", "28MB")  # of 32
    plain = trained(place, nnUNetTrainer, half).state_dict()
    planned = trained(place, nnUNetTrainerShoal, half).state_dict()
    assert plain.keys() == planned.keys()
    unequal = [name for name, value in plain.items() if not np.array_equal(value.numpy(), planned[name].numpy())]
    assert not unequal
