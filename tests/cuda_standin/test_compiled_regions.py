"""Compiled regions on CUDA: fewer launches than one by one, and the bytes that were predicted.

Their code does nothing here, so nothing can be measured: every region stays.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import shoal
from shoal.capture import aligned_rows, padded_products
from shoal.engine import compiled_regions, faster_products
from shoal.kernels.compiled_region import compile_regions, region_of
from tests.cuda_standin.counts import device_counts
from tests.engine.compile.compiled import Residual
from tests.engine.training_laws import blocks


class LanguageModel(nn.Module):
    """A layer of GPT-2 without attention, its GELU written out, and logits over a vocabulary of odd size."""

    def __init__(self, words: int = 5025, width: int = 128, *, classes_second: bool = True) -> None:
        super().__init__()
        self.classes_second = classes_second
        self.words = nn.Embedding(words, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        y = self.up(self.norm(x))
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * y**3)))
        logits = F.linear(x + self.down(y), self.words.weight)
        return logits.transpose(1, 2).contiguous() if self.classes_second else logits


def launches_of_a_step(model: nn.Module, x: torch.Tensor) -> int:
    """Of the third one, in bfloat16 autocast."""
    target = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    before = 0
    for _ in range(3):
        model.zero_grad()
        before = device_counts().launches
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
    return device_counts().launches - before


def test_a_step_launches_less_and_takes_the_predicted_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)
    torch.manual_seed(0)
    body = [*blocks(3, 32), Residual(32), *blocks(32, 32), Residual(32)]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    x = torch.randn(8, 3, 32, 32, device="cuda")
    one_by_one, joined = (
        shoal.compile(copy.deepcopy(net), budget="1GiB", allow="recompute", options=shoal.Options(kernels=kernels))
        for kernels in ("eager", "compiled")
    )
    assert launches_of_a_step(joined, x) <= launches_of_a_step(one_by_one, x) - 10  # an op for each of its regions
    assert joined.shoal.plan.compiled == ("12 regions of 27 ops, 7 of them different",)
    assert joined.shoal.measured_peak_bytes == pytest.approx(joined.shoal.predicted_peak_bytes, rel=0.02)


def test_after_the_first_step_kernels_are_launched_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)
    torch.manual_seed(0)
    net = nn.Sequential(*blocks(3, 32), Residual(32), nn.Flatten(), nn.Linear(32 * 16, 10)).cuda()
    model = shoal.compile(net, budget="1GiB", allow="recompute", options=shoal.Options(kernels="compiled"))
    x, looked, launch = torch.randn(8, 3, 4, 4, device="cuda"), list[str](), CachingAutotuner.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        looked.append(kernel.fn.__name__)
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "run", run)
    for _ in range(3):
        model.zero_grad()
        before, n_looked = device_counts().launches, len(looked)
        model(x).sum().backward()
    assert device_counts().launches - before >= 12 and n_looked >= 4
    assert len(looked) == n_looked


def test_a_region_that_an_earlier_process_tried_out_times_its_kernels_before_the_step() -> None:
    """To time several ways of launching one, copies of its operands are allocated."""
    x, y = torch.empty(512, 256, device="cuda"), torch.empty(256, 512, device="cuda").t()

    def turned(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x + y).t().contiguous(),)

    region = region_of(turned, turned(x, y)[0], (x, y), "words", "turned, tried out")
    region.overwritable = ()  # as it is remembered
    with fresh_cache():  # without the fastest way, which PyTorch remembers
        compile_regions([region])
        assert region.failure == "" and region.launches() is not None


def calls_of(run: Any, folder: Path) -> list[dict[str, Any]]:
    """What PyTorch's profiler has of ops and of Triton's kernels: name, `Input Dims`, `Input Strides`, `Input type`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [{"name": event["name"], **event["args"]} for event in events if event.get("cat") == "cpu_op"]


@pytest.mark.parametrize("classes_second", [True, False])
def test_a_language_models_products_have_no_odd_sizes_and_its_gelu_is_written_once(
    classes_second: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a loss outside of the model, as `bench.gpu` has it: of 4 x 128 tokens.

    PyTorch 2.11 hands the gradient of logits over as the loss makes it, with the classes apart if they come second.
    Logits that no op reads are given dense; others, and the gradients, are written as rows are wanted. A gradient that
    comes in odd rows, and is taken for large here, is copied within its products.
    """
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)
    monkeypatch.setattr(faster_products, "_SLOWER", math.inf)
    monkeypatch.setattr(padded_products, "_LEAST_FLOPS", 1e8)
    monkeypatch.setattr(padded_products, "_FLOPS_OF_A_BYTE", 10)
    monkeypatch.setattr(aligned_rows, "_MOST_COPIED_BYTES", 0)
    torch.manual_seed(0)
    network = LanguageModel(classes_second=classes_second).cuda()
    model = shoal.compile(network, budget="1GiB", allow="recompute", options=shoal.Options(kernels="compiled"))
    tokens = torch.randint(5025, (4, 128), device="cuda")

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
        assert logits.is_contiguous() and logits.untyped_storage().nbytes() == 2 * 4 * 128 * 5025
        logits = logits if classes_second else logits.transpose(1, 2)
        F.cross_entropy(logits.float(), tokens).backward()

    for _ in range(3):
        step()
    calls = calls_of(step, tmp_path)
    products = [call for call in calls if call["name"] in ("aten::mm", "aten::addmm")]
    assert len(products) == 9  # three layers, forward and the gradients of input and weight
    for call in products:
        for sizes in (*call["Input Dims"], *call["Input Strides"]):
            assert all(size == 1 or size % 8 == 0 for size in sizes), (call["Input Dims"], call["Input Strides"])
    transposed = [call for call in calls if call["name"] == "aten::clone" and "BFloat16" in call["Input type"][0]]
    # Regions do that, of logits and of their gradients. A gradient laid out otherwise than the logits PyTorch copies.
    assert not transposed or not classes_second
    of_gelu = 4 * 128 * 512  # elements: forward reads one such tensor and writes one, backward reads two and writes one
    kernels = [call for call in calls if call["name"].startswith("triton_")]
    whole = [[math.prod(dims) for dims in call["Input Dims"]].count(of_gelu) for call in kernels]
    assert sorted(count for count in whole if count) == [2, 3]
    assert model.shoal.measured_peak_bytes == pytest.approx(model.shoal.predicted_peak_bytes, rel=0.02)
