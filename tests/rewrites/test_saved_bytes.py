"""Each rewrite saves exactly the bytes it promises and changes no bit of any result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.core.step import StepGraph, Storage
from shoal.kernels.batch_norm import backward_repeats_bits
from shoal.kernels.pieces import Cut
from tests.engine.training_laws import assert_same_training, same_bits
from tests.joint_graphs import (
    NETWORKS,
    Concatenated,
    batch,
    before_and_after_rewrites,
    captured_step,
    operands,
    run_joint,
)

aten = torch.ops.aten


class Indexed(nn.Module):
    """Max pooling whose indices are handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.max_pool2d(self.conv(x), 2, return_indices=True)


class Both(nn.Module):
    """What a layer makes, handed out in addition to what the next layer makes of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.layer, self.last = nn.Conv2d(3, 4, 1), layer, nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layer(self.conv(x))
        return self.last(x), x


def conv(n_in: int, n_out: int, **options: Any) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False, **options)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **NETWORKS,
    "pool with ties and padding": lambda: nn.Sequential(conv(3, 4), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten()),
    "pools of rectified maxima": lambda: nn.Sequential(
        *(conv(3, 4), nn.ReLU(), nn.MaxPool2d(3, 1, 1), conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Tanh()),
    ).to(memory_format=torch.channels_last),
    "pool of windows with gaps after a rectifier": lambda: nn.Sequential(
        conv(3, 4), nn.ReLU(), nn.MaxPool2d(2, 2, 1, dilation=3), nn.Tanh()
    ),
    "pool of too large a window": lambda: nn.Sequential(conv(3, 4), nn.MaxPool2d(17, 2, 8), nn.Flatten()),
    "pool, indices handed out": Indexed,
    "dilated pool with ceil": lambda: nn.Sequential(conv(3, 4), nn.MaxPool2d(2, 3, dilation=2, ceil_mode=True)),
    "adaptive pool": lambda: nn.Sequential(conv(3, 4), nn.AdaptiveMaxPool2d(3)),
    "hardtanh": lambda: nn.Sequential(conv(3, 4), nn.Hardtanh(-0.2, 0.3), conv(4, 4), nn.Hardtanh(), nn.ReLU6()),
    "leaky": lambda: nn.Sequential(
        *(conv(3, 4), nn.LeakyReLU(0.1), conv(4, 4), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True)),
        *(conv(4, 4), nn.LeakyReLU(0.0), conv(4, 4), nn.LeakyReLU(-0.5), conv(4, 2)),
    ),
    "leaky in front of what reads no result": lambda: nn.Sequential(conv(3, 4), nn.LeakyReLU(0.2), nn.Tanh()),
    "prelu": lambda: nn.Sequential(
        *(conv(3, 4), nn.InstanceNorm2d(4), nn.PReLU(), conv(4, 4), nn.GroupNorm(2, 4), nn.PReLU(4)),
        *(conv(4, 4), nn.PReLU(), nn.LayerNorm(8), nn.GELU()),
    ),
    "frozen prelu": lambda: nn.Sequential(conv(3, 4), nn.PReLU().requires_grad_(False), conv(4, 4), nn.ELU()),
    "threshold": lambda: nn.Sequential(conv(3, 4), nn.Threshold(0.2, 0.1), conv(4, 4), nn.Threshold(0, 0)),
    "relu handed out": lambda: Both(nn.ReLU()),
    "relu before relu": lambda: nn.Sequential(conv(3, 4), nn.ReLU(), nn.ReLU(), nn.BatchNorm2d(4)),
    "channels last": lambda: NETWORKS["plain"]().to(memory_format=torch.channels_last),
    "frozen first layer": lambda: frozen(NETWORKS["residual"](), 1),
    "frozen batch norms": lambda: frozen_statistics(NETWORKS["residual"]()),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), nn.ELU(), conv(4, 2, stride=2)),
    "no affine": lambda: nn.Sequential(conv(3, 4), nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
    "parts of a concatenation": lambda: Concatenated(Concatenated(conv(3, 4), nn.ReLU()), nn.BatchNorm2d(7)),
}


def frozen(model: nn.Module, count: int) -> nn.Module:
    for parameter in list(model.parameters())[:count]:
        parameter.requires_grad_(False)
    return model


def frozen_statistics(model: nn.Module) -> nn.Module:
    class Evaluated(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Evaluated
            module.training = False
    return model


def saved(graph: StepGraph) -> list[Storage]:
    return [graph.storages[s] for s in graph.saved]


def saved_bytes(captured: Captured) -> int:
    return sum(s.nbytes for s in saved(captured.graph))


@pytest.mark.parametrize("model", MODELS)
def test_no_bit_of_any_result_changes_and_no_more_bytes_are_saved(model: str) -> None:
    torch.manual_seed(0)
    before, after = before_and_after_rewrites(MODELS[model]())
    tensors = operands(before.joint)
    damaged = [tensor.clone() for tensor in tensors]
    (images,) = [tensor for tensor in damaged if tensor.shape == (2, 3, 8, 8)]
    images[0, 0, ::3] = float("nan")
    images[1, 1, ::2, 1::3] = float("-inf")
    assert saved_bytes(after) <= saved_bytes(before)
    for inputs in (tensors, damaged):
        for ours, theirs in zip(run_joint(after.joint, inputs), run_joint(before.joint, inputs), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert same_bits(ours, theirs)
                assert ours.is_contiguous() == theirs.is_contiguous()


def test_max_pooling_saves_a_byte_for_each_index_and_nothing_of_its_input() -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.MaxPool2d(2), nn.Flatten()))
    outputs, inputs = 2 * 4 * 4 * 4, 2 * 4 * 8 * 8
    assert (saved_bytes(before), saved_bytes(after)) == (8 * outputs + 4 * inputs, outputs)
    assert [s.dtype for s in saved(after.graph)] == ["uint8"]


def test_indices_that_are_handed_out_stay_what_they_are() -> None:
    _, after = before_and_after_rewrites(Indexed())
    assert [node.meta["val"].dtype for node in after.forward_outputs] == [torch.float32, torch.int64]


def test_a_clipped_activation_saves_its_output_which_the_next_layer_saves_anyway() -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.ReLU6(), conv(4, 4)))
    assert (saved_bytes(before), saved_bytes(after)) == (2 * 4 * 512, 4 * 512)
    (clipped,) = saved(after.graph)
    assert after.graph.ops[after.graph.producer[clipped.id]].target == "aten.hardtanh.default"


@pytest.mark.parametrize(("slope", "tensors"), [(0.01, 1), (0.0, 1), (-0.5, 2)])
def test_a_leaky_relu_saves_its_output_unless_that_hides_the_sign_of_its_input(slope: float, tensors: int) -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.LeakyReLU(slope), conv(4, 4)))
    assert (saved_bytes(before), saved_bytes(after)) == (2 * 4 * 512, tensors * 4 * 512)


def test_a_leaky_relu_whose_output_no_one_else_saves_waits_in_a_byte_an_element() -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.LeakyReLU(0.1), nn.Tanh()))
    assert saved_bytes(before) - saved_bytes(after) == 3 * 512
    assert sorted(s.dtype for s in saved(after.graph)) == ["bool", "float32"]


class OverGradients(nn.Module):
    """Norms and a PReLU whose backward ops may each lie over the gradient that reaches them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Conv3d(1, 8, 1), layer, nn.Conv3d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.first(x)))


OVER_GRADIENTS: dict[str, Callable[[], nn.Module]] = {
    "instance norm": lambda: nn.InstanceNorm3d(8),
    "instance norm with weights": lambda: nn.InstanceNorm3d(8, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "layer norm": lambda: nn.LayerNorm(32),
    "prelu": nn.PReLU,
    "prelu by channel": lambda: nn.PReLU(8),
    "gelu": nn.GELU,
    "elu": nn.ELU,
}


@pytest.mark.parametrize("layer", OVER_GRADIENTS)
def test_a_layer_s_gradient_lies_over_the_one_that_reaches_it(layer: str) -> None:
    x = torch.randn(1, 1, 32, 128, 32)
    before, after = before_and_after_rewrites(OverGradients(OVER_GRADIENTS[layer]()), x)
    one = 8 * x.nbytes
    inside = [op for op in after.graph.ops[after.graph.n_forward :] if op.layer == "layer" and op.phase == "backward"]
    written = [op for op in inside if any(after.graph.storages[place].nbytes == one for place in op.writes)]
    assert [op.overwrites >= 0 for op in written] == [True]
    assert sum(after.graph.storages[place].nbytes == one for op in written for place in op.writes) == 1
    tensors = operands(before.joint)
    for ours, theirs in zip(run_joint(after.joint, tensors), run_joint(before.joint, tensors), strict=True):
        assert ours is None or same_bits(ours, theirs)


def test_a_rectifier_whose_output_no_one_else_saves_waits_in_a_byte_an_element() -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.ReLU(), nn.AvgPool2d(8)))
    # Pooling by averages names its input only for the shape, which keeps it all the same.
    assert saved_bytes(before) == saved_bytes(after) == 4 * 512


def test_a_rectifier_before_max_pooling_waits_in_the_codes_of_the_pooling() -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()))
    assert (saved_bytes(before), saved_bytes(after)) == (4 * 512 + 8 * 128, 128)
    assert [s.dtype for s in saved(after.graph)] == ["uint8"]


def test_a_rectifier_that_is_not_pooled_alone_or_in_windows_with_gaps_keeps_its_own_mask() -> None:
    for tail in (nn.MaxPool2d(2, dilation=2), Concatenated(nn.MaxPool2d(3, 1, 1))):
        _, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.ReLU(), tail, nn.Flatten()))
        assert max(s.nbytes for s in saved(after.graph) if s.dtype == "bool") == 512


def test_a_rectifier_whose_output_is_saved_anyway_or_handed_out_is_left_as_it_is() -> None:
    for model in (nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 4)), Both(nn.ReLU())):
        before, after = before_and_after_rewrites(model)
        assert saved_bytes(after) == saved_bytes(before) == 4 * 512


def test_the_backward_pass_of_batch_norm_saves_no_running_statistics() -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.Flatten()))
    assert saved_bytes(before) - saved_bytes(after) == 2 * 4 * 4  # the moved ones; those before belong to the model
    statistics = {s.id for s in after.graph.storages if s.shape == (4,) and s.kind in ("buffer", "output")}
    assert len(statistics) == 2  # moved in place
    for op in after.graph.ops[after.graph.n_forward :]:
        assert op.phase == "loss" or not statistics.intersection(op.reads)


def test_a_batch_norm_that_does_not_train_keeps_the_statistics_it_normalised_by() -> None:
    _, after = before_and_after_rewrites(frozen_statistics(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))))
    buffers = {s.id for s in after.graph.storages if s.kind == "buffer" and s.shape == (4,)}
    read = {s for op in after.graph.ops[after.graph.n_forward :] for s in op.reads}
    assert buffers & read


@pytest.mark.parametrize("small", [False, True])
def test_the_gradient_of_batch_norm_takes_the_block_of_the_incoming_gradient(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr("shoal.rewrites.norms.WORTH_PIECES_BYTES", 0)
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.Tanh())
    graph = captured_step(model).graph
    (op,) = [op for op in graph.ops if "batch_norm" in op.target and op.phase == "backward"]
    if small or not backward_repeats_bits(torch.float32, torch.float32, torch.device("cpu"), 4, 4, False):
        assert op.target == "aten.native_batch_norm_backward.default"
    else:
        assert op.target == "shoal.batch_norm.backward"
        assert graph.ops[graph.producer[op.overwrites]].target == "aten.tanh_backward.default"


def test_under_autocast_it_does_so_in_channels_last_with_eager_bits() -> None:
    torch.manual_seed(0)
    layers = [conv(3, 32), nn.BatchNorm2d(32), nn.ReLU(), conv(32, 40), nn.BatchNorm2d(40), nn.Tanh()]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 13, 11).to(memory_format=torch.channels_last)
    gradients = []
    for own in (eager := copy.deepcopy(model), ours := shoal.compile(copy.deepcopy(model), "1GiB", allow="bitwise")):
        with torch.autocast("cpu", torch.bfloat16):
            own(x).float().square().sum().backward()
        gradients.append([parameter.grad for parameter in own.parameters()])
    assert all(torch.equal(mine, its) for mine, its in zip(*gradients, strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(mine, its) for mine, its in zip(ours.buffers(), eager.buffers(), strict=True))
    norms = [op for op in ours.shoal.plan.graph.ops if "batch_norm" in op.target and op.phase == "backward"]
    repeat = [backward_repeats_bits(torch.bfloat16, torch.float32, torch.device("cpu"), 4, c, True) for c in (40, 32)]
    assert [op.target == "shoal.batch_norm.backward" and op.overwrites >= 0 for op in norms] == repeat


def test_where_pieces_do_not_repeat_the_bits_pytorchs_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kernels.batch_norm.backward_repeats_bits", lambda *_: False)
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.Tanh()).to(memory_format=torch.channels_last)
    targets = [op.target for op in captured_step(model).graph.ops]
    assert "aten.native_batch_norm_backward.default" in targets


@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_input", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 2])
def test_on_other_machines_too_a_convolution_lets_its_input_go_unless_that_alone_chooses_the_layout(
    of_input: torch.memory_format, of_weight: torch.memory_format, groups: int
) -> None:
    last = nn.Conv2d(4, 6, 3, groups=groups)
    model = nn.Sequential(conv(3, 4), nn.Tanh(), last).to(memory_format=of_weight)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=of_input)
    graph = capture_step(model, x, name="net", runs_here=False)[0].graph
    (of_tanh,) = [op for op in graph.ops if op.target == "aten.tanh_backward.default"]
    gradient = graph.ops[graph.producer[of_tanh.reads[0]]]
    (tanh,) = [op for op in graph.ops if op.target == "aten.tanh.default"]
    # Where it is not grouped, the gradient of its result has the same layout.
    chooses = of_input is torch.channels_last and of_weight is torch.contiguous_format and groups > 1
    assert (tanh.writes[0] in gradient.reads) == chooses
    assert ("input_gradient" in gradient.target) != chooses


@pytest.mark.parametrize("layer", [conv(4, 5), nn.Conv2d(4, 6, 1, groups=2), nn.ConvTranspose2d(4, 4, 2, 2)])
def test_a_convolution_can_let_its_input_go_before_the_gradient_of_its_input_comes(layer: nn.Module) -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), nn.Tanh(), layer))
    graph = after.graph
    (x,) = [op.writes[0] for op in graph.ops if op.target == "aten.tanh.default"]
    (of_input,) = [op for op in graph.ops if op.target == "shoal.convolution.input_gradient"]
    of_weight = next(op for op in graph.ops if op.target == "aten.convolution_backward.default" and x in op.reads)
    assert of_weight.id < of_input.id
    assert x not in of_input.reads
    assert sum(op.flops for op in graph.ops if "convolution" in op.target) == sum(
        op.flops for op in before.graph.ops if "convolution" in op.target
    )


def test_a_weight_gradient_with_a_large_scratch_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rewrites.convolutions.cut_of_large_weight", lambda *_: Cut(0, 2, 1))
    _, after = before_and_after_rewrites(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), conv(5, 6)))
    in_pieces = [op for op in after.graph.ops if op.target == "shoal.convolution_pieces.weight_gradient"]
    assert len(in_pieces) == 2
    assert all(op.flops > 0 for op in in_pieces)


def test_copies_that_only_in_place_semantics_need_are_dropped() -> None:
    model = nn.Sequential(conv(3, 4), nn.ReLU(inplace=True), conv(4, 4), nn.ReLU6(inplace=True), conv(4, 4))
    targets = {node.target for node in captured_step(model).joint.graph.nodes}
    assert not targets & {aten.clone.default, aten.detach.default}


def test_a_gradient_is_not_copied_for_an_in_place_activation_of_a_view() -> None:
    model = nn.Sequential(conv(3, 4), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True), conv(4, 4))
    targets = {node.target for node in captured_step(model).joint.graph.nodes}
    assert aten.leaky_relu_backward.default in targets
    assert not targets & {aten.copy.default, aten.new_empty_strided.default}


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = (self.weight * x).mH
        return torch.view_as_real(turned.resolve_conj()) * turned.imag.resolve_neg().unsqueeze(-1)


def test_a_copy_that_conjugates_is_not_dropped() -> None:
    torch.manual_seed(0)
    assert_same_training(Conjugated(), [torch.rand(6), torch.rand(6)])


WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda x: x.as_strided((2, 3, 4, 8), (256, 64, 16, 1)),
    "circular": lambda x: F.pad(x, (1, 1, 2, 1), mode="circular"),
    "circular volume": lambda x: F.pad(x, (1, 1, 2, 1, 1, 2), mode="circular"),
    "nested": lambda x: _written(x, lambda out: out[:, 1][:, 1:][..., ::2]),
    "selected diagonal": lambda x: _written(x, lambda out: out.diagonal(0, 2, 3)[:, 2]),
    "past itself": lambda x: _shifted(x, 4),
}


def _written(x: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    out = torch.zeros_like(x)
    view(out).copy_(view(x))
    return out + 1


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    out = x * 2
    out[..., by:] = out[..., :-by]
    return out


@pytest.mark.parametrize("written", WRITTEN)
def test_what_is_written_through_views_is_as_in_plain_pytorch(written: str) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return WRITTEN[written](self.conv(x).sin()).exp()

    torch.manual_seed(0)
    assert_same_training(Written(), [batch(), batch()])


def test_a_view_of_a_view_is_written_at_once() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.pad(self.conv(x), (1, 1, 1, 1), mode="circular")

    graph = captured_step(Padded()).joint.graph
    viewed = graph.find_nodes(op="call_function", target=aten.slice_scatter.default)
    written = graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default)
    assert all(node.args[0].target is not aten.slice.Tensor for node in viewed)
    assert len(written) == 1


HANDED_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone, detach": lambda x: x.clone().detach(),
    "clone, view": lambda x: x.clone().flatten(1),
    "detach, clone, view": lambda x: x.detach().clone().flatten(1),
    "detach, clone, part": lambda x: x.detach().clone()[:, 1:],
    "detach, clone": lambda x: x.detach().clone(),
}


@pytest.mark.parametrize("handed_out", HANDED_OUT)
def test_a_copy_that_is_handed_out_may_be_changed_without_harm(handed_out: str) -> None:
    class Copied(Both):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.conv(x)
            return self.last(x), HANDED_OUT[handed_out](x)

    plain = Copied(nn.Identity())
    planned = shoal.compile(copy.deepcopy(plain))
    x = batch()
    for model in (plain, planned):
        result, copied = model(x)
        with torch.no_grad():
            copied.fill_(100.0)
        result.square().sum().backward()
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout(1.0), nn.Dropout2d(0.5), nn.Dropout(0.7, inplace=True)])
def test_dropout_gives_the_bits_of_eager_pytorch(layer: nn.Module) -> None:
    assert_same_training(nn.Sequential(conv(3, 4), layer, nn.Flatten()), [batch(), batch()])


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stays = torch.empty_like(x, dtype=torch.bool).bernoulli_(0.8)
        return torch.where(stays, x, torch.empty_like(x).bernoulli_())


class Permuted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(x.shape), 0.3, inplace=True)


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.3, inplace=True), nn.AlphaDropout(0.3), nn.Dropout3d(0.3, inplace=True), Noisy(), Permuted()]
)
def test_noise_is_drawn_in_the_layout_of_what_it_is_for(layer: nn.Module) -> None:
    model = nn.Sequential(conv(3, 4), layer, nn.Flatten()).to(memory_format=torch.channels_last)
    batches = [batch().to(memory_format=torch.channels_last) for _ in range(2)]
    assert_same_training(model, batches)
    assert_same_training(model, [one[:1] for one in batches])


def test_dropout_saves_a_byte_an_element() -> None:
    (mask,) = saved(captured_step(nn.Sequential(conv(3, 4), nn.Dropout(0.3), nn.Flatten())).graph)
    assert (mask.dtype, mask.nbytes) == ("bool", 512)


def test_dropout_of_nothing_draws_nothing() -> None:
    assert not any(op.random for op in captured_step(nn.Sequential(conv(3, 4), nn.Dropout(0.0))).graph.ops)


class Eager(torch.autograd.Function):
    """Makes in the forward pass what only its backward pass reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Eager.apply(x)


def test_what_the_backward_pass_makes_of_forward_tensors_alone_is_made_just_before_it_is_read() -> None:
    before, after = before_and_after_rewrites(nn.Sequential(conv(3, 4), Sine(), conv(4, 4), nn.Tanh()))

    def place(captured: Captured) -> int:
        (op,) = [op for op in captured.graph.ops if op.target == "aten.cos.default"]
        (reader,) = captured.graph.readers[op.writes[0]]
        return reader - op.id

    assert place(before) > 1
    assert place(after) == 1
