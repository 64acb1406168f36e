"""The batch norm benchmark: what its tables say, what it holds contenders against, and what it will not overlook."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench import batchnorm, batchnorm_steps, batchnorm_tables
from bench.batchnorm_contenders import A_A, COMPILED, COMPILED_FUSED, CONTENDERS, EAGER, FUSED, INDUCTOR, Asked
from bench.batchnorm_tables import NOISE
from bench.frame import WrongResult
from bench.processes import malloc_environment
from bench.workload import Forward, Workload
from shoal.app.models import BasicBlock
from tests.raising import raising

ASKED = Asked("resnet18_cifar", 2, 32, (EAGER, A_A, "bnff"), rounds=1, threads=1, limit_side=96)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures a small network in the place of every other."""

    def make(name: str, batch: int, image: int, *, seed: int = 0) -> Workload:
        torch.manual_seed(seed)
        widens = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
        stem = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        blocks = BasicBlock(8, 8, 1, None), BasicBlock(8, 16, 2, widens)
        net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
        images = torch.randn(batch, 3, image, image).contiguous(memory_format=torch.channels_last)
        return Workload(name, net.to(memory_format=torch.channels_last), images, torch.arange(batch) % 5, seed)  # type: ignore[call-overload]

    monkeypatch.setattr(batchnorm_steps, "make_workload", make)


def row(contender: str, times: float, inductor: float | None = None, peak: int = 400, **more: Any) -> dict[str, Any]:
    against = {EAGER: times} | ({INDUCTOR: inductor} if inductor else {})
    return {
        "contender": contender,
        "title": CONTENDERS[contender].title,
        "forward_seconds": [1 / times, 5 / times, 1 / times],
        "backward_seconds": [2 / times] * 3,
        "times": {other: dict.fromkeys(("forward", "backward", "step"), value) for other, value in against.items()},
        "saved_bytes": 2048,
        "saved_storages": 3,
        "peak_bytes": peak,
        **more,
    }


def result(network: str, *rows: dict[str, Any], malloc: str = "tuned", batch: int = 16, **more: Any) -> dict[str, Any]:
    asked = {"network": network, "batch": batch, "image": 224, "threads": 2, "pool_first": False}
    return {
        "malloc": malloc,
        "asked": asked,
        "default_level": "icf",
        "flops": 300e9,
        "limit_flops_per_second": 200e9,
        "rows": list(rows),
        **more,
    }


def printed(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=220, no_color=True).print(table)
    return out.getvalue()


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if name in line)


def test_a_table_has_what_was_measured_beside_what_the_paper_says() -> None:
    rows = row(EAGER, 1.0, 1.25, 1000), row("bnff", 1.5, 2.0, 300), row("icf", 2.0, 2.5, 250)
    text = printed(batchnorm_tables.step_table(result("densenet121", *rows)))
    assert "300.0 GFLOP a step, limit 200 GFLOP/s" in text and "batch 120" in text
    cells = [cell.strip() for cell in line_of(text, "icf").split("│")[1:-1]]
    measured = ["0.500 s", "1.000 s", "1.500 s", "2.00", "2.50", "2.000 KiB", "250 B", "25.0 %", "200.0", "100 %"]
    assert cells == ["fuse_batchnorm, icf", *measured, "1.44, estimated"]
    assert "1.26 (1.48, 1.15)" in line_of(text, "bnff")
    assert line_of(text, "eager  ").rstrip(" │").endswith("-"), "the paper has no figure for it"


def test_a_contender_that_cannot_run_keeps_its_row_and_says_why() -> None:
    failed = {"contender": INDUCTOR, "title": "Inductor", "failed": "no C++ compiler"}
    text = printed(batchnorm_tables.step_table(result("resnet50", row(EAGER, 1.0), failed)))
    assert "Inductor: no C++ compiler" in text


def test_targets_are_met_or_not_by_the_default_level_under_tuned_malloc() -> None:
    dense = result("densenet121", row(EAGER, 1.0, 1.2, 1000), row("bnff", 9.9, 9.9, 100), row("icf", 1.4, 1.3, 310))
    residual = result("resnet50", row(EAGER, 1.0), row("icf", 1.1))
    plain = result("resnet50", row(EAGER, 1.0), row("icf", 5.0), malloc="default")
    found = batchnorm_tables.verdicts([dense, residual, plain])
    assert [verdict["met"] for verdict in found] == [True, False, False, True]
    assert [verdict["measured"] for verdict in found] == [1.4, 1.3, 0.31, 1.1]
    lines = [batchnorm_tables.verdict_line(verdict) for verdict in found]
    assert "stretch of 1.50 is not met" in lines[0] and lines[1].startswith("NOT MET") and "31.0 %" in lines[2]


def test_a_target_reads_what_a_user_gets_first_and_the_highest_level_where_it_is_the_same() -> None:
    rows = row(EAGER, 1.0), row("bnff", 1.2), row("icf", 1.3)
    of = [
        (FUSED, (*rows, row(FUSED, 1.1))),
        ("bnff", rows),
        ("icf", (rows[0], rows[2])),
        (None, (rows[0], row("rcf", 2))),
    ]
    for name, held in of:
        (found,) = (
            verdict
            for verdict in batchnorm_tables.verdicts([result("resnet50", *held) | {"default_level": "bnff"}])
            if verdict["target"].startswith("resnet50")
        )
        assert CONTENDERS[name].title in found["reported"] if name else "'bnff' was measured" in found["reported"]
        assert found["met"] is (True if name else None)


def test_a_target_that_was_not_measured_is_neither_met_nor_missed() -> None:
    found = batchnorm_tables.verdicts([result("densenet121", row(EAGER, 1.0), row("icf", 1.6), batch=4)])
    assert [verdict["met"] for verdict in found] == [None] * 4 and [found[0]["measured"], found[2]["measured"]] == [
        1.6,
        1,
    ]
    assert "the target is for 16 x 224" in found[0]["reported"] and "stretch of 1.50 is met" in found[0]["reported"]


def test_what_a_user_gets_who_sets_nothing_is_said_of_default_malloc_alone() -> None:
    rows = row(EAGER, 1.0), row(COMPILED_FUSED, 2.1)
    lines = list(
        batchnorm_tables.without_tunables(
            [result("densenet121", *rows, malloc="default"), result("densenet121", *rows)]
        )
    )
    assert len(lines) == 1 and "2.10 × plain eager" in lines[0]


def test_a_network_of_the_zoo_that_is_slower_is_told_and_noise_is_not() -> None:
    fused = {"level": "bnff", "fused": 3, "left": 1}
    quick = result("vgg16", row(EAGER, 1.0), row(A_A, 1.01), row(FUSED, 1 - NOISE / 2, **fused))
    slow = result("alexnet", row(EAGER, 1.0), row(A_A, 0.99), row(FUSED, 0.7, **fused))
    text = printed(batchnorm_tables.zoo_table([quick, slow]))
    assert "not slower" in line_of(text, "vgg16") and "SLOWER" in line_of(text, "alexnet")
    found = batchnorm_tables.zoo_verdict([quick, slow])
    assert found["met"] is False and found["measured"] == 0.7 and "alexnet (tuned malloc) 0.70" in found["reported"]
    assert batchnorm_tables.zoo_verdict([quick])["met"] is True


def test_bytes_are_those_of_distinct_storages_without_parameters_and_batch() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(2), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 2))
    workload = Workload("tiny", net, torch.randn(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64))
    assert batchnorm_steps.saved_storages(workload, net) == (2 * 4 * 16 * 4, 1)  # the sigmoid's, which two ops save


def test_flops_are_those_of_convolutions_and_products_forward_and_backward() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    workload = Workload("tiny", net, torch.randn(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64))
    convolution, product = 2 * 2 * 16 * 4 * 3 * 9, 2 * 2 * 64 * 2
    assert batchnorm_steps.step_flops(workload) == 2 * convolution + 3 * product  # the images have no gradient
    assert workload.model[1].num_batches_tracked == 0, "counting leaves the network as it was"  # type: ignore[index]


def test_every_contender_is_held_against_eager_metered_and_timed(small: None) -> None:
    reported: list[str] = []
    found = batchnorm_steps.measure(ASKED, reported.append)
    rows = {one["contender"]: one for one in found["rows"]}
    assert list(rows) == list(ASKED.contenders)
    assert all(len(one["forward_seconds"]) == len(one["backward_seconds"]) == 1 for one in rows.values())
    assert rows[EAGER]["off"] == rows[A_A]["off"] == dict.fromkeys(rows[EAGER]["off"], 0.0)
    assert rows["bnff"]["off"]["gradients"] > 0
    assert rows["bnff"]["saved_bytes"] < rows[A_A]["saved_bytes"] == rows[EAGER]["saved_bytes"]
    assert rows[A_A]["peak_bytes"] == rows[EAGER]["peak_bytes"] > found["resident_bytes"]
    assert any("bnff" in what for what in reported)
    assert found["default_level"] == "bnff" and found["limit_flops_per_second"] > 0
    text = printed(batchnorm_tables.step_table({"malloc": "default", **found}))
    assert "resnet18_cifar, 2 x 32 pixels, 1 thread, default malloc, pools first for none" in text


def _forgets(model: nn.Module) -> Forward:
    """As a fused network that leaves the running statistics where they are."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    return model


def _drops_a_term(model: nn.Module) -> Forward:
    """As a backward pass that forgets what the statistics of one batch norm in the middle depend on."""
    norm = model[3].bn1  # type: ignore[index]

    def without(x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x.detach(), (0, 2, 3), keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight.view(1, -1, 1, 1) + norm.bias.view(
            1, -1, 1, 1
        )

    whole = norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            whole(x)
        return without(x)

    norm.forward = forward  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (_forgets, "running_mean"),
        (_drops_a_term, "gradient of"),
        (lambda model: lambda x: 1.01 * model(x), "outputs"),
    ],
)
@pytest.mark.parametrize("fuses", [False, True])
def test_wrong_training_is_noticed_in_float32_and_in_float64(
    make: Any, reported: str, fuses: bool, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(CONTENDERS["bnff"], title="wrong", make=make, fuses=fuses)
    monkeypatch.setitem(CONTENDERS, "bnff", wrong)  # type: ignore[arg-type]
    with raising(WrongResult, "wrong", "float64" if fuses else "", reported):
        batchnorm_steps.measure(replace(ASKED, contenders=(EAGER, "bnff")))


def test_a_compiler_that_fails_leaves_a_row_with_its_reason(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module) -> Forward:
        raise RuntimeError("no C++ compiler\nmore of it")

    monkeypatch.setitem(CONTENDERS, INDUCTOR, replace(CONTENDERS[INDUCTOR], make=fail))  # type: ignore[arg-type]
    found = batchnorm_steps.measure(replace(ASKED, contenders=(EAGER, INDUCTOR)))
    assert found["rows"][1]["failed"] == "no C++ compiler"
    assert "forward_seconds" in found["rows"][0]


def test_an_arena_serves_the_steps_of_its_contenders_alone(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler there is none; what replaces it here counts."""
    opened = []

    class Counts:
        bytes, fragmentation, departures, replayed_steps = 4096, 1.0, 0, 2

        def __init__(self) -> None:
            self.steps = 0
            opened.append(self)

        def __enter__(self) -> Counts:
            return self

        def __exit__(self, *_: object) -> None:
            self.closed = True

        @contextmanager
        def step(self) -> Iterator[None]:
            self.steps += 1
            yield

    monkeypatch.setattr(batchnorm_steps, "Arena", Counts)
    plain = replace(CONTENDERS[COMPILED], make=copy.copy)
    monkeypatch.setitem(CONTENDERS, COMPILED, plain)  # type: ignore[arg-type]
    found = batchnorm_steps.measure(replace(ASKED, contenders=(EAGER, COMPILED), rounds=3))
    (arena,) = opened
    assert arena.steps == 4 + 1 + 1 + 3 and arena.closed  # until it replays, held, warmed up, timed
    assert found["rows"][1]["arena"]["bytes"] == 4096 and "arena" not in found["rows"][0]


@pytest.mark.slow
def test_a_step_that_eager_itself_does_not_repeat_is_refused() -> None:
    """The last batch norms of DenseNet-121 see two values here."""
    asked = replace(ASKED, network="densenet121", contenders=(EAGER,))
    with raising(batchnorm.InputError, "32 pixels"):
        batchnorm_steps.measure(asked)


def test_a_run_pools_first_with_the_malloc_that_is_asked_for_and_the_zoo_is_compared_alike(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(asked: Asked, malloc: str, stage: Callable[[str], None]) -> dict[str, Any]:
        return json.loads(json.dumps(batchnorm_steps.answer(json.loads(json.dumps(asdict(asked))), stage)))

    monkeypatch.setattr(batchnorm, "in_a_process", here)
    network = ["--quick", "--networks", "resnet18_cifar", "--image", "32", "--threads", "1", "--out", str(tmp_path)]
    asked = ["--contenders", ",".join(batchnorm.ZOO), "--pool-first", "all", "--mallocs", "tuned"]
    assert batchnorm.main([*network, *asked]) == 0
    (path,) = tmp_path.glob("batchnorm_*.json")
    found = json.loads(path.read_text())
    (first,) = found["results"]
    assert (first["malloc"], first["asked"]["pool_first"]) == ("tuned", True)
    assert [verdict["met"] for verdict in found["verdicts"]] == [None] * 4  # of other networks
    reported = capsys.readouterr().out
    assert "resnet18_cifar, 2 x 32" in reported and "densenet121: at least 1.35 × eager" in reported

    assert batchnorm.main(["--zoo", *network, "--mallocs", "default"]) == 0
    (path,) = tmp_path.glob("batchnorm_zoo_*.json")
    found = json.loads(path.read_text())
    assert [one["malloc"] for one in found["results"]] == ["default"]
    (verdict,) = found["verdicts"]
    assert verdict["met"] in (True, False) and "of 1" in verdict["reported"]
    assert "resnet18_cifar, 2 x 32" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_has_the_malloc_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "false")  # tests run side by side
    stages: list[str] = []
    found = batchnorm.in_a_process(replace(ASKED, contenders=(EAGER,)), "tuned", stages.append)
    assert "hugetlb=1" in found["conditions"]["malloc"]["GLIBC_TUNABLES"]
    assert [row["contender"] for row in found["rows"]] == [EAGER] and stages


def test_wrong_training_is_one_line_and_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(*_: object) -> None:
        raise WrongResult("resnet50, fuse_batchnorm, icf: trains otherwise than eager PyTorch: outputs")

    monkeypatch.setattr(batchnorm, "in_a_process", differ)
    assert batchnorm.main(["--quick", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("bench.batchnorm: resnet50, fuse_batchnorm, icf: trains otherwise")


@pytest.mark.slow
def test_a_process_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "processes.py").write_text("raise SystemExit('out of memory')")
    monkeypatch.chdir(tmp_path)
    with raising(batchnorm.InputError, "resnet18_cifar"):
        batchnorm.in_a_process(ASKED, "tuned", print)


def test_threads_are_pinned_unless_told_otherwise_and_no_other_malloc_gets_in() -> None:
    inherited = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=2", "OMP_NUM_THREADS": "9"}
    pinned = {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2", "BENCH_CPU_ALLOCATOR": "torch"}
    assert malloc_environment("", 2, inherited, pinned=True) == pinned
    reported = malloc_environment("glibc.malloc.mmap_max=0", 2, {**inherited, "OMP_PROC_BIND": "spread"}, pinned=True)
    assert reported == {**pinned, "OMP_PROC_BIND": "spread", "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--networks", "resnet5"], "--networks resnet5: give some of alexnet"),
        (["--contenders", "bnff,fast"], "--contenders fast: give some of eager"),
        (["--mallocs", "jemalloc"], "--mallocs jemalloc: give some of default, tuned"),
        (["--mallocs", ""], "--mallocs nothing"),
        (["--batch", "0"], "--batch 0: give 1 or more"),
        (["--rounds", "-1"], "--rounds -1: give 1 or more"),
        (["--networks", "unet", "--image", "33"], "33"),
        (["--zoo", "--contenders", "icf"], "--contenders is for whole steps"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batchnorm.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.batchnorm: ") and reported in error
