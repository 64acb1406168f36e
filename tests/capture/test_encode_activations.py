"""The rewritten step: what is encoded, who reads what it decodes to, and that nothing else changes by a bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from shoal import codecs
from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encode_residences, encoded, offers, payload_name, payloads
from shoal.core.lossy import EXEMPTIONS, LossyOptions
from shoal.core.residence import Encode, Offload
from shoal.core.schedule import schedule
from shoal.core.validate import check_runs
from shoal.errors import PlanError
from shoal.kernels.encoded_activation import decode, encode
from tests.engine.lossy_steps import chain, everything_encoded
from tests.engine.training_laws import keep_by_chance, offload_by_chance, same_bits
from tests.joint_graphs import NETWORKS, Concatenated, Residual, batch, captured_step, operands, run_joint, run_lowered
from tests.random_steps import HARDWARE

aten = torch.ops.aten
LOSSY = LossyOptions("dynamic_tree", 2048)


def conv(n_in: int, n_out: int, **options: Any) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 3, padding=1, **options)


class Twice(nn.Module):
    """One convolution that is called twice, and an input that two read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.beside = conv(3, 4), conv(4, 4), conv(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.again(self.again(x).relu()) + self.beside(x)


class Sliced(nn.Module):
    """Convolutions that read parts of what was computed whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = conv(3, 4), conv(4, 4), conv(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh().abs()
        return self.left(x[..., :5]).sum() + self.right(x[..., 3:]).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: chain(3, 4, 4, 6),
    "clipped": lambda: chain(3, 4, 4, 6, act=nn.ReLU6),
    "channels last": lambda: chain(3, 4, 4, 6).to(memory_format=torch.channels_last),
    "strided and grouped": lambda: nn.Sequential(
        *(conv(3, 8), nn.ReLU(), conv(8, 8, groups=4, stride=2), nn.ReLU(inplace=True), conv(8, 4, bias=False))
    ),
    "batch norm": lambda: nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.BatchNorm2d(4)),
    "residual": lambda: nn.Sequential(
        *(conv(3, 4), nn.ReLU(), Residual(conv(4, 4), nn.ReLU(), conv(4, 4)), Residual(conv(4, 4)), conv(4, 4))
    ),
    "concatenated": lambda: nn.Sequential(
        conv(3, 4), Concatenated(nn.MaxPool2d(2), conv(4, 4), nn.ReLU(), nn.ConvTranspose2d(4, 4, 2, 2)), conv(8, 4)
    ),
    "pooled": lambda: nn.Sequential(conv(3, 4), nn.ReLU(), nn.MaxPool2d(2), conv(4, 4), nn.ReLU(), nn.AvgPool2d(2)),
    "shared": Twice,
    "sliced": Sliced,
    "dropout": lambda: nn.Sequential(conv(3, 4), nn.ReLU(), nn.Dropout(0.4), conv(4, 4)),
}


@cache
def step_of(name: str) -> tuple[Captured, Captured, list[torch.Tensor]]:
    """The step of one of `MODELS`, the same with all encoded, and what to run it on."""
    captured = captured_step(MODELS[name]())
    return captured, everything_encoded(captured, LOSSY), operands(captured.joint)


def nodes_reading(captured: Captured, storage: str) -> list[str]:
    graph = captured.graph
    return [graph.ops[op].target for op in graph.readers[graph.storage_called[storage].id]]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_keep_their_bits_and_of_the_gradients_only_those_of_weights_behind_an_encoding_change(
    name: str,
) -> None:
    captured, rewritten, tensors = step_of(name)
    torch.manual_seed(3)
    exact = run_joint(captured.joint, tensors)
    torch.manual_seed(3)
    lossy = run_joint(rewritten.joint, tensors)
    differing = 0
    for ours, theirs, node in zip(lossy, exact, rewritten.joint.graph.output_node().args[0], strict=True):
        if ours is None or (ours.dim() == 4 and _comes_from_decoded(node)):
            differing += ours is not None and not same_bits(ours, theirs)
        else:
            assert same_bits(ours, theirs), node
    assert differing, "the test shows nothing: nothing was lost"


def _comes_from_decoded(node: Any) -> bool:
    return node.target is decode or any(map(_comes_from_decoded, node.all_input_nodes))


@pytest.mark.parametrize("codec", ["dynamic_tree", "linear"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_weight_gradient_errs_by_no_more_than_its_input_does(codec: str, layout: torch.memory_format) -> None:
    """The bound of each value, carried through the convolution's gradient in float64."""
    model = chain(3, 8, 8, 12).to(memory_format=layout)
    x = batch(16).to(memory_format=layout)
    captured = captured_step(model, x)
    rewritten = everything_encoded(captured, LossyOptions(codec, 512))
    tensors = operands(captured.joint)
    exact, lossy = (_convolution_backwards(step, tensors) for step in (captured, rewritten))
    held = codecs.get(codec, block=512)
    checked = 0
    for name, (grad, read, weight, _) in exact.items():
        _, _, _, found = lossy[name]
        if torch.equal(read, lossy[name][1]):
            continue
        checked += 1
        grad64, read64 = grad.double(), read.double()
        of_weight = torch.nn.grad.conv2d_weight(read64, weight.shape, grad64, padding=1)
        bound = torch.nn.grad.conv2d_weight(held.error_bound(read), weight.shape, grad64.abs(), padding=1)
        sums = torch.nn.grad.conv2d_weight(read64.abs(), weight.shape, grad64.abs(), padding=1)
        off = (found.double() - of_weight).abs()
        assert (off <= bound + 1e-5 * sums).all()
        assert off.norm() > 0, "the test shows nothing: nothing was lost"
        assert (off.norm() / of_weight.norm()) < 0.02
    assert checked == 2


def _convolution_backwards(step: Captured, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """By name: gradient of the output, input, weight, and the gradient of the weight, of each op that gives one."""
    seen: dict[str, Any] = {}

    class Watcher(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            result = super().run_node(node)
            if node.target is aten.convolution_backward.default:
                grad, read, weight = (self.env[operand] for operand in node.args[:3])
                seen[node.name] = grad.clone(), read.clone(), weight, result[1].clone()
            return result

    with torch.no_grad():
        Watcher(step.joint, garbage_collect_values=False).run(*tensors, enable_io_processing=False)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_however_its_storages_wait_the_step_gives_the_same_bits(name: str) -> None:
    captured, rewritten, tensors = step_of(name)
    graph = rewritten.graph
    assert payloads(graph).keys() == {offer.storage for offer in offers(captured, LOSSY)}
    torch.manual_seed(3)
    expected = run_joint(rewritten.joint, tensors)
    for seed, planner in enumerate([keep_by_chance(1, 0.0), keep_by_chance(2, 0.5), *map(offload_by_chance, range(3))]):
        residences = encode_residences(planner(graph, HARDWARE, 0).residences, payloads(graph), LOSSY)
        check_runs(graph, residences, schedule(graph, residences))
        torch.manual_seed(3)
        found = run_lowered(rewritten, residences, [t.clone() for t in tensors], in_place=seed % 2 == 0)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours is theirs is None or same_bits(ours, theirs)


def test_a_payload_is_what_waits_a_quarter_and_a_scale_for_each_block() -> None:
    captured = captured_step(chain(3, 4, 4, 6), batch(16))
    rewritten = everything_encoded(captured, LOSSY)
    for offer in offers(captured, LOSSY):
        exact = captured.graph.storage_called[offer.storage]
        payload = rewritten.graph.storage_called[payload_name(offer.storage)]
        elems = exact.nbytes // 4
        assert payload.nbytes == offer.payload_bytes == elems + 4 * -(-elems // 2048)
        assert payload.id in rewritten.graph.saved
        assert rewritten.graph.storage_called[offer.storage].id not in rewritten.graph.saved
        assert payload.layer == exact.layer


def test_the_mask_of_a_relu_is_read_from_the_codes() -> None:
    _, rewritten, _ = step_of("chain")
    reading = nodes_reading(rewritten, payload_name("relu"))
    assert [target.rpartition(".")[2] for target in reading] == ["decode", "relu_backward"]
    assert not any(target.endswith("_to_copy.default") for target in nodes_reading(rewritten, "relu"))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LeakyReLU(0.1),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(0.1)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_another_backward_op_reads_is_not_offered(layer: nn.Module) -> None:
    """Its exact values wait anyway: encoding them too would only add bytes."""
    captured = captured_step(nn.Sequential(conv(3, 4), layer, Residual(conv(4, 4), nn.BatchNorm2d(4))))
    graph = captured.graph
    for offer in offers(captured, LOSSY):
        reading = [graph.ops[op] for op in graph.readers[graph.storage_called[offer.storage].id]]
        assert all("convolution" in op.target for op in reading if op.phase == "backward")


def test_the_first_layer_and_batch_norms_are_exempt_unless_asked_otherwise() -> None:
    model = nn.Sequential(nn.AvgPool2d(2), conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4))

    def offered(*exempt: str) -> set[tuple[str, ...]]:
        step = captured_step(model, batch(16))
        return {offer.layers for offer in offers(step, LossyOptions("linear", 64, exempt=frozenset(exempt)))}

    assert offered(*EXEMPTIONS) == {("4",)}
    assert offered("batch_norm") == {("1",), ("4",)}
    assert offered("first_layer") == {("2",), ("4",)}
    assert offered() == {("1",), ("2",), ("4",)}


def test_with_batch_norms_encoded_too_the_forward_pass_keeps_its_bits() -> None:
    lossy = LossyOptions("dynamic_tree", 512, exempt=frozenset())
    captured, _, tensors = step_of("batch norm")
    rewritten = everything_encoded(captured, lossy)
    exact, found = run_joint(captured.joint, tensors), run_joint(rewritten.joint, tensors)
    n_outputs = len(captured.forward_outputs)
    assert all(same_bits(a, b) for a, b in zip(found[:n_outputs], exact[:n_outputs], strict=True))
    for ours, theirs in zip(found[n_outputs:], exact[n_outputs:], strict=True):
        assert (ours is theirs is None) or (ours - theirs).norm() <= 0.05 * theirs.norm() + 5e-3


@pytest.mark.parametrize("name", ["plain", "residual", "views", "dense", "u", "mobile"])
def test_any_network_may_be_asked_for_offers(name: str) -> None:
    captured = captured_step(NETWORKS[name]())
    before = captured.graph
    for offer in offers(captured, LOSSY):
        assert encoded(captured, [offer.storage], LOSSY).graph.storage_called[payload_name(offer.storage)]
    assert captured.graph == before


def test_double_precision_is_left_alone() -> None:
    captured = captured_step(chain(3, 4, 4).double(), batch().double())
    assert not offers(captured, LOSSY)


def test_the_same_choice_gives_the_same_step() -> None:
    captured, _, _ = step_of("chain")
    chosen = [offer.storage for offer in offers(captured, LOSSY)]
    one, other = (encoded(captured, names, LOSSY).graph for names in (chosen, chosen[::-1]))
    assert one == other
    assert encoded(captured, chosen[:1], LOSSY).graph.fingerprint != one.fingerprint


def test_a_second_run_of_an_encoding_is_one_like_the_first() -> None:
    rewritten = everything_encoded(step_of("chain")[0], LossyOptions("linear", 64, seed=5))
    ops = [op for op in rewritten.graph.ops if rewritten.node_of.get(op.name) is not None]
    assert all(op.recomputable for op in ops if rewritten.node_of[op.name].target is encode)


def test_unknown_storages_are_refused() -> None:
    captured, _, _ = step_of("chain")
    with pytest.raises(PlanError):
        encoded(captured, ["nowhere"], LOSSY)
    with pytest.raises(PlanError):
        encoded(captured, ["convolution"], LOSSY)


def test_residences_say_what_is_encoded_and_what_becomes_of_the_exact_values() -> None:
    said = encode_residences({"relu": Offload("a", "b")}, {n: payload_name(n) for n in ("relu", "relu_1")}, LOSSY)
    assert said["relu"] == Encode("dynamic_tree", 2048, None, "relu_encoded", Offload("a", "b"))
    assert said["relu_1"] == Encode("dynamic_tree", 2048, None, "relu_1_encoded")
