"""The command line: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import shoal
from examples.networks.unet import UNet
from examples.planners import NAMES
from shoal.app import cli, models
from shoal.app.cli import app
from shoal.app.training import loop
from shoal.app.training.results import run_folder
from shoal.core import presets
from shoal.core.hardware import MeasuredLink
from shoal.core.plan import Plan
from shoal.memory.cpu_allocator import why_unavailable
from tests.app.training.tiny import Tiny, put_in_place
from tests.ranks import forked, run_on_ranks

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)
SYNTHETIC = "examples.data.synthetic:open_synthetic"
SMALL = ["--model", "resnet34", "--data", SYNTHETIC, "--batch", "8", "--image", "16", "--epochs", "1"]
PLAIN = [*SMALL, "--planner", "none"]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_line(result: Result) -> str:
    """A user's mistake, as reported on stderr with exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("shoal: ") and not any(line.endswith(" ") for line in result.stderr.splitlines())
    return " ".join(result.stderr.split())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """Every network is a tiny one."""
    put_in_place(monkeypatch, here)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "much"], "--budget much is not a size"),
        (["--budget", "-5MiB"], "--budget -5MiB is not a size"),
        (["--budget", "0"], "must be positive"),
        (["--budget", "1MiB"], "the budget is 1.000 MiB"),
        ([], "no budget was given"),
        (["--planner", "none", "--enforce"], "no budget was given"),
        (["--budget", "1GiB", "--model", "resnet19"], "unknown model 'resnet19': did you mean 'resnet18'?"),
        (["--budget", "1GiB", "--model", "json:x"], "json:x: json has no function x"),  # :x: is an emoji for rich
        (["--budget", "1GiB", "--data", "digit"], "unknown data 'digit': did you mean 'digits'?"),
        (["--budget", "1GiB", "--planner", "optimal"], "no planner is called 'optimal'"),
        (["--budget", "1GiB", "--image", "100000"], "a batch of 128 x 3 x 100000 x 100000 takes"),
        (["--budget", "1GiB", "--image", str(2**64)], f"--image {2**64}: no process can address"),
        (["--budget", "1GiB", "--batch", str(2**64)], f"--batch {2**64}"),
        (["--budget", "1GiB", "--seed", str(2**64)], f"--seed {2**64}: it must be at most"),
        (["--budget", "1GiB", "--timeout", "nan"], "--timeout nan"),
        (["--budget", "1GiB", "--timeout", "1e300"], "--timeout 1e+300"),
        (["--budget", "1GiB", "--device", "tpu"], "--device tpu"),
        (["--budget", "1GiB", "--batch", "0"], "--batch 0: it must be at least 1"),
        (["--budget", "1GiB", "--root", "/nowhere"], "root"),
        (["--budget", "1GiB", "--resume"], "no checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(here: Path, arguments: list[str], said: str) -> None:
    line = error_line(invoke("train", *arguments))
    assert line.startswith("shoal: ")
    assert said in line


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_the_system_does_not_give_is_one_line_and_exit_code_3(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(loop, "train", no_memory)
    result = invoke("train", *PLAIN)
    assert result.exit_code == 3 and result.stderr.count("\n") == 1
    monkeypatch.setattr(shoal, "plan", no_memory)
    result = invoke("plan", "--model", "resnet18_cifar", "--budget", "1GiB", "--image", "32", "--batch", "2")
    assert result.exit_code == 3 and result.stderr.count("\n") == 1


def test_two_runs_into_one_folder_are_reported_before_training(here: Path) -> None:
    with run_folder(here / "run"):
        assert "another run is writing to run" in error_line(invoke("train", *PLAIN, "--out", "run"))
    assert not list((here / "run").iterdir())


def test_an_out_folder_that_cannot_be_is_reported_before_training(here: Path) -> None:
    (here / "file").write_text("")
    assert "file" in error_line(invoke("train", *PLAIN, "--out", "file/run"))
    assert "file" in error_line(invoke("train", *PLAIN, "--json", "file/run.json"))


def test_a_damaged_checkpoint_is_reported(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "checkpoint.pt").write_bytes(b"PK")
    assert "damaged or not a Shoal checkpoint" in error_line(invoke("train", *PLAIN, "--out", "run", "--resume"))


@pytest.mark.usefixtures("tiny")
def test_a_run_of_plain_pytorch_leaves_a_checkpoint_and_its_result(here: Path) -> None:
    done = invoke("train", *PLAIN, "--json", "result.json")
    assert done.exit_code == 0, done.output
    assert "epoch 1/1  loss" in done.stdout
    assert (here / "runs" / "resnet34-open_synthetic" / "checkpoint.pt").is_file()
    result = json.loads((here / "result.json").read_text())
    assert (result["model"], result["data"], result["batch"]) == ("resnet34", SYNTHETIC, 8)
    assert result["budget_bytes"] is None and result["predicted_peak_bytes"] is None
    assert len(result["losses"]) == 3
    assert 0 <= result["test_accuracy"] <= 1
    assert result["finished"] is True
    assert result["versions"].keys() == {"shoal", "torch", "python", "threads", "cpu_allocator", "seed"}
    assert result["versions"]["cpu_allocator"] == ("torch" if why_unavailable() else "caching")


@pytest.mark.usefixtures("tiny")
def test_a_run_of_shoal_tells_its_plan_and_writes_everything(here: Path) -> None:
    arguments = [*SMALL, "--planner", "examples.planners.sqrt:sqrt", "--budget", "1GiB"]
    done = invoke("train", *arguments, "--out", "run", "--json", "result.json")
    assert done.exit_code == 0, done.output
    for name in (
        "kept",
        "recomputed",
        "predicted peak",
        "no plan in this order of ops",
        "measured peak",
        "test accuracy",
    ):
        assert name in done.stdout
    written = {path.name for path in (here / "run").iterdir()}
    assert written == {"checkpoint.pt", "plan.json", "report.html", "trace.json"}
    assert "run/report.html" in done.stdout
    result = json.loads((here / "result.json").read_text())
    assert result["budget_bytes"] == 2**30
    assert 0 < result["measured_peak_bytes"] <= 2**30
    assert result["measured_peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.02)
    assert result["planning_seconds"] > 0 and result["lower_bound_seconds"] >= 0
    assert result["images_per_second"] > 0


@needs_compiler
def test_a_run_that_offloads_to_a_file_trains_within_its_limit(tmp_path: Path) -> None:
    # In a process of its own: a memory limit counts what earlier tests have left in this one.
    ((code, stdout, stderr),) = run_on_ranks(train_within_a_limit, 1, tmp_path)
    assert code == 0, stderr
    assert "offloaded" in stdout
    assert json.loads((tmp_path / "result.json").read_text())["measured_peak_bytes"] <= 1200 * 2**10
    assert Plan.load(tmp_path / "run" / "plan.json").offloaded
    assert {path.name for path in tmp_path.iterdir()} == {"run", "result.json"}


def train_within_a_limit(folder: Path) -> tuple[int, str, str]:
    os.chdir(folder)
    told = ["--offload-to", ".", "--out", "run", "--json", "result.json"]
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(patch, folder, depth=4)
        done = invoke("train", *SMALL, "--planner", NAMES["hmms"], "--budget", "1200KiB", "--enforce", *told)
    return done.exit_code, done.stdout, done.stderr


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_a_rehearsal_runs_with_the_link_of_the_target(here: Path) -> None:
    done = invoke("train", *SMALL, "--budget", "2MiB", "--rehearse", "p100-nvlink", "--host-budget", "1GiB")
    assert done.exit_code == 0, done.stderr
    (saved,) = here.rglob("plan.json")
    link = Plan.load(saved).graph.link
    assert link is not None and link.name.startswith("NVLink 1.0")
    assert link.host_bytes == 2**30


@needs_compiler
@pytest.mark.usefixtures("tiny")
@pytest.mark.usefixtures("tiny")
def test_a_run_that_diverges_ends_with_exit_code_4_and_its_result_is_json(here: Path) -> None:
    result = invoke("train", *PLAIN, "--lr", "1e30", "--json", "result.json", "--out", "run")
    assert result.exit_code == 4, result.output
    assert result.stderr.count("\n") == 1 and "--lr" in result.stderr

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    kept = json.loads((here / "result.json").read_text(), parse_constant=refused)
    assert kept["losses"][-1] is None and isinstance(kept["losses"][0], float)
    assert kept["finished"] is False and kept["diverged"]
    assert not (here / "run" / "checkpoint.pt").exists()


def test_plain_pytorch_that_meets_its_limit_ends_with_exit_code_3(here: Path) -> None:
    done = invoke("train", *PLAIN, "--budget", "1MiB", "--enforce")
    assert done.exit_code == 3
    assert done.stderr.startswith("shoal: out of memory: plain PyTorch does not fit a memory limit of 1.000 MiB")
    assert done.stderr.count("\n") == 1


def interrupted_in_the_second_epoch(folder: Path, arguments: list[str]) -> None:
    """The command as a shell runs it, in a process that gets SIGINT in the fifth step."""
    os.chdir(folder)
    sys.stderr = (folder / "stderr").open("w")
    forward, steps = Tiny.forward, []

    def interrupted(self: Tiny, images: torch.Tensor) -> torch.Tensor:
        steps.append(self.training)
        if sum(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, images)

    Tiny.forward = interrupted  # type: ignore[method-assign]
    put_in_place(pytest.MonkeyPatch(), folder)
    sys.argv = ["shoal", *arguments]
    cli.main()


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.usefixtures("tiny")
def test_ctrl_c_leaves_a_run_that_resume_finishes(here: Path) -> None:
    arguments = ["train", *PLAIN, "--out", "run", "--epochs", "3", "--workers", "1", "--json", "result.json"]
    running = forked(interrupted_in_the_second_epoch, here, arguments)
    running.join()
    said = (here / "stderr").read_text()
    assert running.exitcode == 130, said
    assert "same command with --resume continues it" in said
    assert "Traceback" not in said
    interrupted = json.loads((here / "result.json").read_text())
    assert interrupted["finished"] is False

    resumed = invoke(*arguments, "--resume")
    assert resumed.exit_code == 0, resumed.output
    finished = json.loads((here / "result.json").read_text())
    assert finished["finished"] is True
    assert finished["losses"][: len(interrupted["losses"])] == interrupted["losses"]
    assert len(interrupted["losses"]) == 5 and len(finished["losses"]) == 9


@pytest.mark.parametrize("data", [SYNTHETIC, "digits"])
def test_a_network_of_ones_own_trains_and_may_answer_per_pixel(here: Path, data: str) -> None:
    (here / "mine.py").write_text(
        "from torch import nn\n\n\ndef net(num_classes=2):\n    return nn.Conv3d(1, num_classes, 3, padding=1)\n"
        if data == SYNTHETIC
        else "from torch import nn\n\n\ndef net():\n    return nn.Conv2d(3, 10, 3, padding=1)\n"
    )
    arguments = ["--model", "mine.py:net", "--data", data, "--image", "8", "--batch", "64", "--epochs", "1"]
    done = invoke("train", *arguments, "--planner", "none")
    if data == SYNTHETIC:
        assert done.exit_code == 0, done.output
        assert (here / "runs" / "net-open_synthetic" / "checkpoint.pt").is_file()
    else:
        assert "mine.py:net has an output per pixel, data 'digits' a label per image" in error_line(done)


def test_data_of_ones_own_may_have_a_label_per_pixel_and_gets_the_channels_of_the_network(here: Path) -> None:
    (here / "mine.py").write_text(
        "from examples.data.synthetic import open_synthetic\n"
        "from torch import nn\n\n\n"
        "def net():\n    return nn.Conv2d(5, 2, 3, padding=1)\n\n\n"
        "def data(*, in_channels=3, image=8):\n"
        "    return open_synthetic(in_channels=in_channels, image=image, dense=True, train_samples=8, test_samples=4)\n"
    )
    arguments = ["--model", "mine.py:net", "--data", "mine.py:data", "--image", "8", "--batch", "4", "--epochs", "1"]
    done = invoke("train", *arguments, "--planner", "none")
    assert done.exit_code == 0, done.output


def test_hardware_lists_this_machine_and_those_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str | None]] = []

    def measure_links(device: str, folder: str | None) -> tuple[MeasuredLink, ...]:
        measured.append((device, folder))
        return (MeasuredLink("host slab", 9e9, 8e9, 1e-6, 2e-6, 3e-6),)

    monkeypatch.setattr(cli.hardware, "measure", lambda device: presets.get("h200"))
    monkeypatch.setattr(cli.hardware, "measure_links", measure_links)
    done = invoke("hardware", "--device", "cpu", "--folder", "disk", "--json")
    assert done.exit_code == 0, done.output
    here, *elsewhere = json.loads(done.stdout)
    assert here["name"] == "h200"
    assert [link["to_device_bytes_per_second"] for link in here["links"]] == [8e9]
    assert [machine["name"] for machine in elsewhere] == list(presets.names())
    assert all("links" not in machine for machine in elsewhere)
    shown = invoke("hardware", "--device", "cpu").stdout
    assert "p100-nvlink" in shown and "host slab" in shown
    assert measured == [("cpu", "disk"), ("cpu", None)]


def test_a_folder_that_is_not_there_is_reported(here: Path) -> None:
    assert "--folder nowhere is not a folder" in error_line(
        invoke("hardware", "--device", "cpu", "--folder", "nowhere")
    )


@pytest.fixture
def planned(here: Path, tiny: None) -> Callable[..., Result]:
    def plan(*more: str) -> Result:
        arguments = ["plan", "--model", "resnet34", "--batch", "8", "--image", "32", "--planner", "chain"]
        return invoke(*arguments, "--budget", "1GiB", "--hardware", "p100-nvlink", *more)

    return plan


def test_a_plan_for_a_machine_that_is_not_here(planned: Callable[..., Result], here: Path) -> None:
    done = planned("--out", "plans")
    assert done.exit_code == 0, done.output
    assert "predicted peak" in done.stdout and "p100-nvlink" in done.stdout
    assert {path.name for path in (here / "plans").iterdir()} == {"plan.json", "plan.html", "trace.json"}


def test_a_plan_as_json(planned: Callable[..., Result]) -> None:
    figures = json.loads(planned("--json").stdout)
    assert figures["model"] == "resnet34"
    assert figures["budget_bytes"] == 2**30
    assert 0 < figures["predicted_peak_bytes"] <= figures["plain_peak_bytes"]


@pytest.mark.usefixtures("tiny")
def test_a_split_network_saves_smaller_storages(here: Path) -> None:
    arguments = ["plan", "--model", "resnet18", "--batch", "16", "--image", "32", "--hardware", "p100-nvlink"]
    arguments += ["--planner", "keep_all", "--allow", "bitwise", "--json"]
    whole = json.loads(invoke(*arguments).stdout)
    figures = json.loads(invoke(*arguments, "--split", "1", "--grid", "2x1", "--halo", "exact").stdout)
    assert figures["kept_storages"] > 1.5 * whole["kept_storages"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--split", "2"], "--split 2.0: expected a share"),
        (["--split", "0.5", "--grid", "2by2"], "--grid 2by2: expected numbers of patches"),
        (["--split", "0.5", "--grid", "²x2"], "--grid ²x2: expected numbers of patches"),
        (["--split", "0.5", "--grid", "99x1"], "--grid 99x1 is finer than the feature map at the join"),
        (["--halo", "exact"], "give --split too"),
        (["--stochastic", "0.2"], "give --split too"),
        (["--split", "0.5", "--stochastic", "0.5"], "--stochastic 0.5: expected omega"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_a_mistake_about_splitting_is_reported(arguments: list[str], said: str) -> None:
    for command in (["plan", "--model", "resnet18", "--image", "64", "--budget", "1GiB"], ["train", *SMALL]):
        budget = [] if command[0] == "plan" else ["--budget", "1GiB"]
        assert said in error_line(invoke(*command, *budget, *arguments))


@pytest.mark.usefixtures("tiny")
def test_batch_norms_in_another_form_save_less(here: Path) -> None:
    arguments = ["plan", "--model", "resnet18_cifar", "--batch", "16", "--image", "32", "--hardware", "p100-nvlink"]
    arguments += ["--planner", "keep_all", "--allow", "bitwise"]
    plain = json.loads(invoke(*arguments, "--json").stdout)
    for form, said in (("fused", "fuse_batchnorm, level bnff: "), ("inverted", " norms inverted")):
        done = invoke(*arguments, "--batch-norm", form, "--out", form)
        assert said in done.stdout.splitlines()[0]
        kept = Plan.load(here / form / "plan.json").kept
        assert sum(storage.nbytes for storage in kept) < 0.9 * plain["kept_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-norm", "folded"], "--batch-norm folded: expected one of fused, rcf, mvf, bnff, icf, inverted"),
        (["--batch-norm", "fused", "--split", "0.5"], "cannot run patch by patch"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_a_mistake_about_batch_norms_is_reported(arguments: list[str], said: str) -> None:
    for command in (["plan", "--model", "resnet18", "--image", "64"], ["train", *SMALL]):
        assert said in error_line(invoke(*command, "--budget", "1GiB", *arguments))


def test_without_a_budget_the_device_is_the_budget(here: Path) -> None:
    arguments = ["plan", "--model", "resnet18", "--image", "64", "--hardware", "titanx-pcie", "--planner", "keep_all"]
    figures = json.loads(invoke(*arguments, "--json").stdout)
    assert figures["budget_bytes"] == presets.get("titanx-pcie").device.memory_bytes


def test_a_network_for_a_device_that_is_not_here_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    networks: list[Any] = []

    def plan(network: Any, example: Any, budget: Any, **options: Any) -> Any:
        networks.append((network, example))
        raise KeyboardInterrupt

    monkeypatch.setattr(shoal, "plan", plan)
    invoke("plan", "--model", "examples/networks/vgg.py:vgg19", "--batch", "1000000", "--hardware", "p100-nvlink")
    ((network, example),) = networks
    assert example.is_meta and example.shape == (1000000, 3, 224, 224)
    assert all(tensor.is_meta for tensor in network.state_dict().values())


ALEXNET = ["plan", "--model", "alexnet", "--batch", "256", "--image", "32", "--hardware", "p100-nvlink"]


@pytest.mark.usefixtures("tiny")
def test_the_largest_batch_is_that_of_fit(here: Path) -> None:
    arguments = [*ALEXNET, "--planner", "chain", "--allow", "bitwise", "--budget", "1GiB"]
    done = invoke(*arguments, "--max-batch", "--json")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""  # where nothing watches
    answer = json.loads(done.stdout)["max_batch"]
    assert answer["batch"] < answer["too_many"] <= 1.01 * answer["batch"]
    assert answer["predicted_peak_bytes"] <= 2**30
    assert answer["images_per_second"] == pytest.approx(answer["batch"] / answer["predicted_seconds"])


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_plan_that_does_not_fit_still_has_its_largest_batch(here: Path) -> None:
    arguments = [*ALEXNET, "--batch", "65536", "--planner", "keep_all", "--budget", "1GiB", "--max-batch"]
    arguments += ["--allow", "bitwise"]
    done = invoke(*arguments)
    assert done.exit_code == 2
    first, *details = done.stderr.splitlines()
    assert "alexnet" in first and "1.000 GiB" in first and "--budget " in first
    assert {"minimum:", "budget:", "peak at:"} <= {line.strip().partition("  ")[0] for line in details}
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("largest batch "))
    figures = json.loads(invoke(*arguments, "--json").stdout)
    assert figures["reason"].startswith("alexnet needs ")
    answer = figures["max_batch"]
    assert f"{answer['batch']} images ({answer['too_many']} does not fit)" in line
    assert 0 < answer["batch"] < 65536


@pytest.mark.slow
def test_the_largest_patch_is_that_of_fit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find", lambda name: partial(UNet, 2, 1, 4))
    plan = ["plan", "--model", "unet", "--batch", "2", "--hardware", "rtx-3060-12gb", "--planner", "keep_all"]
    done = invoke(*plan, "--allow", "bitwise", "--image", "8", "--budget", "64KiB", "--max-patch", "--json")
    found = json.loads(done.stdout)["max_patch"]
    assert found["multiple_of"] == [2, 2] and found["predicted_peak_bytes"] <= 2**16
    assert found["patch"] < found["too_large"]


@pytest.mark.usefixtures("tiny")
def test_the_largest_batch_is_found_for_this_machine_too(here: Path) -> None:
    arguments = ["plan", "--model", "resnet18", "--batch", "2", "--image", "32", "--planner", "keep_all"]
    done = invoke(*arguments, "--allow", "keep", "--budget", "1500KiB", "--max-batch", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["max_batch"]["predicted_peak_bytes"] <= 1500 * 2**10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "resnet18"], "no budget was given"),
        (["--model", "resnet18", "--budget", "1GiB", "--hardware", "p1000"], "--hardware p1000 is not a preset"),
        (["--model", "resnet18", "--budget", "1GiB", "--optimizer", "lion"], "--optimizer lion: no"),
        (["--model", "resnet18", "--budget", "few"], "--budget few is not a size"),
        (["--model", "examples.networks.unet:unet", "--image", "50", "--budget", "1GiB"], "multiples of 16x16"),
    ],
)
def test_a_plan_that_cannot_be_made_is_reported(arguments: list[str], said: str) -> None:
    assert said in error_line(invoke("plan", *arguments))


@pytest.mark.usefixtures("tiny")
def test_a_plan_may_be_permitted_to_encode_and_tells_what_that_comes_to(here: Path) -> None:
    arguments = ["plan", "--model", "resnet34", "--batch", "8", "--image", "32", "--hardware", "p100-nvlink"]
    figures = json.loads(invoke(*arguments, "--budget", "1GiB", "--allow", "bitwise,encode", "--json").stdout)
    assert figures["planner"] == "joint"
    assert figures["encoded_storages"] == figures["encoded_bytes"] == figures["payload_bytes"] == 0
    assert figures["codec_seconds"] == 0 and figures["encoding_errors"] == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--codec", "linear"], "--codec has no effect here; give --allow exact,encode too"),
        (["--codec", "dynamic", "--allow", "encode"], "--codec dynamic is unknown; type one of dynamic_tree, "),
        (
            ["--codec", "one_bit", "--allow", "encode"],
            "--codec one_bit is not for activations; type one of ",
        ),
        (["--allow", "encode", "--planner", "chain"], "may encode, which needs --planner joint; 'chain' does not"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_a_mistake_about_encoding_is_reported(arguments: list[str], said: str) -> None:
    for command in (["plan", "--model", "resnet18", "--image", "64"], ["train", *SMALL]):
        assert said in error_line(invoke(*command, "--budget", "1GiB", *arguments))


@pytest.mark.usefixtures("tiny")
def test_a_run_may_be_permitted_to_encode(here: Path) -> None:
    done = invoke(
        "train",
        *SMALL,
        "--budget",
        "1GiB",
        "--allow",
        "bitwise,encode",
        "--codec",
        "linear",
        "--out",
        "run",
        "--json",
        "result.json",
    )
    assert done.exit_code == 0, done.output
    assert json.loads((here / "result.json").read_text())["codec"] == "linear"
