"""Which batch norm a step runs on CUDA, what it launches, and that statistics move once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from examples import networks as models
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.capture.lower import lower
from shoal.capture.pieces import choose_pieces, in_pieces
from shoal.cost.profile import profile_step
from shoal.kernels import norm_pieces
from shoal.planners.just_in_time import just_in_time
from tests.cuda_standin.counts import device_counts


class Asked(TorchDispatchMode):
    """The aten ops that eager PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """A convolution, whose result has the dtype and layout in question, and a norm."""

    def __init__(self, dims: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](3, 4, 1)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def example(dims: int, channels_last: bool) -> torch.Tensor:
    x = torch.empty(2, 3, *[6] * dims, device="cuda")
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    return x.to(memory_format=formats[dims]) if channels_last and dims in formats else x


def norm_ops(captured: Captured) -> list[str]:
    return [op.target for op in captured.graph.ops if "norm" in op.target]


def frozen(norm: nn.Module) -> nn.Module:
    norm.train(False).train = lambda mode=True: norm  # type: ignore[method-assign]
    return norm


NORMS = {
    "plain": (2, lambda: nn.BatchNorm2d(4)),
    "1d": (1, lambda: nn.BatchNorm1d(4)),
    "3d": (3, lambda: nn.BatchNorm3d(4)),
    "no affine": (2, lambda: nn.BatchNorm2d(4, affine=False)),
    "no statistics": (2, lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "instance norm": (2, lambda: nn.InstanceNorm2d(4, affine=True)),
    "frozen": (2, lambda: frozen(nn.BatchNorm2d(4))),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("amp", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_the_step_runs_the_batch_norm_that_eager_pytorch_runs(
    norm: str, amp: torch.dtype | None, channels_last: bool
) -> None:
    dims, make = NORMS[norm]
    model, x = Layer(dims, make()).cuda(), example(dims, channels_last)
    with torch.autocast("cuda", amp) if amp else nullcontext():
        with Asked() as asked:
            model(x).float().sum().backward()
        captured, _ = capture_step(model, x, name="layer")
    cudnn = "cudnn_batch_norm" in asked.names
    forward, backward = norm_ops(captured)
    assert ("cudnn" in forward) == cudnn == (amp is not torch.bfloat16 and norm != "no affine")
    assert ("cudnn" in backward) == ("cudnn_batch_norm_backward" in asked.names)


def test_cudnn_switched_off_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    captured, _ = capture_step(Layer(2, nn.BatchNorm2d(4)).cuda(), example(2, False), name="layer")
    assert not any("cudnn" in target for target in norm_ops(captured))


@pytest.mark.parametrize("reserve_bytes", [0, 4096])
def test_what_cudnn_reserves_is_a_storage_of_the_step(reserve_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_CUDNN_RESERVE_BYTES", str(reserve_bytes))
    captured, _ = capture_step(Layer(2, nn.BatchNorm2d(4)).cuda(), example(2, False), name="layer")
    graph = captured.graph
    (forward,) = (op for op in graph.ops if op.target == "aten.cudnn_batch_norm.default")
    (backward,) = (op for op in graph.ops if op.target == "shoal.cudnn_batch_norm.backward")
    kept = [graph.storages[s] for s in {*forward.writes} & {*backward.reads} if graph.storages[s].dtype == "uint8"]
    assert [storage.nbytes for storage in kept] == ([reserve_bytes] if reserve_bytes else [])


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_statistics_move_once_also_where_the_normalisation_is_made_again(amp: torch.dtype | None) -> None:
    layers = [
        Layer(2, nn.BatchNorm2d(4)),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1),
    ]
    model = nn.Sequential(*layers).cuda()
    with torch.autocast("cuda", amp) if amp else nullcontext():
        captured, _ = capture_step(model, example(2, False), name="layers")
    forward, backward = lower(captured, just_in_time(captured.graph, ()))
    buffers = {node.name for node in captured.forward_outputs if node.op == "placeholder"}
    assert len(buffers) == 2 * 3
    calls = [[n for n in one.graph.nodes if n.op == "call_function"] for one in (forward, backward)]
    moving = [[n for n in some if buffers & {a.name for a in n.all_input_nodes}] for some in calls]
    assert [len(some) for some in moving] == [2 + 1, 0]  # the statistics of each layer, and all counters
    assert sum("norm" in str(n.target) and "backward" not in str(n.target) for n in calls[1]) >= 2


def launches(model: nn.Module, x: torch.Tensor) -> int:
    """Of a step that is none of the first three."""
    for _ in range(4):
        before = device_counts().launches
        model(x).sum().backward()
    return device_counts().launches - before


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_step_with_everything_kept_launches_what_eager_pytorch_launches(channels_last: bool) -> None:
    """Nothing is copied before or after: neither statistics nor counters."""
    model, x = Layer(2, nn.BatchNorm2d(4)).cuda(), example(2, channels_last)
    plain = launches(model, x)
    assert launches(shoal.compile(model, budget="1GiB", options=shoal.Options(planner="keep_all")), x) == plain


def test_a_kept_step_of_resnet50_launches_little_more_than_eager_pytorch() -> None:
    model, x = models.build("resnet50").cuda(), torch.empty(2, 3, 64, 64, device="cuda")
    plain = launches(model, x)
    assert launches(shoal.compile(model, budget="4GiB", options=shoal.Options(planner="keep_all")), x) <= 1.15 * plain


def test_pooling_of_large_images_does_not_wait_for_the_device() -> None:
    """An image of 127 pixels and more looks its codes up in a table, which is made on the device."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 1)).cuda()
    step, x = (
        shoal.compile(model, budget="1GiB", options=shoal.Options(planner="keep_all")),
        torch.empty(2, 3, 160, 160, device="cuda"),
    )
    launches(step, x)
    before = device_counts()
    step(x).sum().backward()
    after = device_counts()
    assert (after.synchronizations, after.copies) == (before.synchronizations, before.copies)


@pytest.mark.parametrize(
    ("amp", "channels_last", "held"),
    [(torch.bfloat16, True, 1 / 8), (torch.bfloat16, False, 1 / 8), (None, False, 3 / 8)],
)
def test_the_gradient_of_a_large_map_takes_the_block_of_the_incoming_one(
    amp: torch.dtype | None, channels_last: bool, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether bits repeat cannot be told where kernels do nothing."""
    monkeypatch.setattr(norm_pieces, "repeats_bits", lambda *_: True)
    layers = [nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.Tanh(), nn.Conv2d(32, 2, 1)]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = nn.Sequential(*layers).cuda().to(memory_format=layout)
    x = torch.empty(8, 3, 128, 128, device="cuda").to(memory_format=layout)
    with torch.autocast("cuda", amp) if amp else nullcontext():
        captured, device = capture_step(model, x, name="large")
    whole = profile_step(captured, device)
    cuts = [
        cut
        for cut in choose_pieces(captured, whole, {"pieces"}, lambda step: profile_step(step, device))
        if "norm" in cut.op
    ]
    assert len(cuts) == 1
    cut = profile_step(in_pieces(captured, cuts), device)
    before, after = whole.op_called[cuts[0].op], cut.op_called[cuts[0].op]
    map_bytes = whole.storages[before.writes[0]].nbytes
    assert before.overwrites == -1 and after.overwrites in after.reads
    assert after.workspace_bytes == pytest.approx(held * map_bytes, rel=0.05)


def test_a_gradient_that_cudnn_lays_out_as_its_input_departs_from_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The incoming one, of a mean over all pixels, is not in channels_last."""
    body = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    net = net.cuda().to(memory_format=torch.channels_last)
    x = torch.empty(4, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    model = shoal.compile(net, budget="1GiB", options=shoal.Options(kernels="eager"))
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    assert "traced" not in caplog.text
    assert model.shoal.captures == 1


def native_norm() -> list[nn.Module]:
    """After it the gradient of a mean over all pixels comes, which is not in channels_last."""
    return [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]


def wide() -> list[nn.Module]:
    """Their results and gradients are laid out as the operands only by the kernels."""
    upsample = nn.Upsample(scale_factor=2, mode="bilinear")
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)]
    return [nn.Conv2d(3, 8, 3), upsample, nn.Hardswish(), nn.PixelUnshuffle(2), nn.Hardswish(), *last]


@pytest.mark.parametrize("layers", [native_norm, wide])
def test_kernels_that_lay_out_otherwise_than_traced_depart_from_nothing(
    layers: Callable[[], list[nn.Module]], caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(*layers()).cuda().to(memory_format=torch.channels_last)
    x = torch.empty(4, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    model = shoal.compile(net, budget="1GiB", options=shoal.Options(kernels="eager"))
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
    assert "traced" not in caplog.text
    assert model.shoal.captures == 1
