"""One law for every row of the table: with that row alone, a step gives what plain PyTorch gives.

The bits if the row promises them; else, for one that promises the same function, no further from float64 than plain
float32. A new row needs a layer in `LAYERS` that it rewrites, or a network in `NETWORKS`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from shoal.capture.capture_step import InputPlaces, capture_step, joint_step
from shoal.capture.captured import Captured
from shoal.capture.step_reader import capture, needed_by
from shoal.core.means import BITWISE, LOSSY
from shoal.errors import PlanError
from shoal.graph.fx_nodes import changed_inputs
from shoal.graph.joint import Joint
from shoal.kernels import batch_norm, direct_convolution, group_norm, layer_norm
from shoal.kernels.pieces import Cut
from shoal.lowlevel.native import levels
from shoal.lowlevel.torch_internals import eager_kernels
from shoal.rewrites import activations, buffers, convolutions, layouts, norms
from shoal.rewrites.rewrite import Rewrite, call_instead, rewrite
from shoal.rewrites.table import TABLE
from shoal.transforms.split.slice_graph import slice_graph
from tests.cudnn_on_the_cpu import cudnn_on_the_cpu
from tests.engine.training_laws import same_bits
from tests.float32_rule import too_far
from tests.joint_graphs import operands, run_joint
from tests.raising import raising
from tests.rewrites.test_buffers import Shifted
from tests.rewrites.test_compact import Skipping
from tests.rewrites.test_concatenations import Dense, Level
from tests.rewrites.test_fused_norms import network as fused
from tests.rewrites.test_saved_bytes import Sine
from tests.transforms.split.test_slice_graph import Network, region_of

ROWS = {row.name: row for row in TABLE}
CPU = torch.device("cpu")
Made = tuple[nn.Module, torch.Tensor]


class Through(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(), nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.norm(self.conv(x)).relu().float()


class Written(nn.Module):
    """A learned value written through a mask, or an index."""

    def __init__(self, through_mask: bool) -> None:
        super().__init__()
        self.value, self.through_mask = nn.Parameter(torch.randn(())), through_mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.through_mask:
            return x.index_fill(1, torch.tensor([0, 2]), self.value)
        x = x.clone()
        x[x > 0.5] = self.value
        return x


def conv(kernel: int = 3) -> nn.Module:
    return nn.Conv2d(8, 8, kernel, padding=kernel // 2)


def circular(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="circular")[..., 1:-1, 1:-1].contiguous()


def added_to(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 1:3] += x[:, :2].exp()
    return y


def strided(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)).view(x.shape)


def in_place(layer: nn.Module) -> nn.Module:
    return nn.Sequential(conv(), nn.BatchNorm2d(8), layer)


# Name of a row → layers of 8 channels that it rewrites. They stand among others, which it rewrites too, or does not.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sums through masks": lambda: Written(True),
    "sums through indices": lambda: Written(False),
    "copies dropped": lambda: Through(lambda x: x.sin().clone() * 2),
    "unread statistics not saved": lambda: nn.BatchNorm2d(8),
    "whole scatters viewed": lambda: nn.Sequential(Through(lambda x: strided(x.sin().contiguous())), conv()),
    "written copies dropped": lambda: Through(added_to),
    "nested views written at once": lambda: Through(circular),
    "duplicates merged": lambda: Through(lambda x: x.sin().exp() * x.sin().exp()),
    "statistics moved in place": lambda: nn.BatchNorm2d(8),
    "batches counted in place": lambda: nn.BatchNorm2d(8),
    "batches counted at once": lambda: nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8)),
    "changed buffers copied": lambda: Shifted(8, 1, 1),
    "gradients typed as computed": UnderAutocast,
    "batch norms left to cuDNN": lambda: in_place(nn.Tanh()),
    "gradients laid out as computed": nn.Tanh,
    "results in their own storage": lambda: Through(lambda x: x * F.mse_loss(x, torch.zeros_like(x))),
    "batch norm gradients in place": lambda: in_place(nn.Tanh()),
    "group norm gradients in place": lambda: nn.Sequential(conv(), nn.GroupNorm(2, 8), nn.Tanh()),
    "layer norm gradients in place": lambda: nn.Sequential(conv(), nn.LayerNorm(12), nn.Tanh()),
    "PReLU gradients in place": lambda: nn.PReLU(8),
    "clipped outputs saved": nn.ReLU6,
    "leaky outputs saved": lambda: nn.LeakyReLU(0.1),
    "convolution gradients split": conv,
    "convolution inputs not saved": conv,
    "dropout masks in bytes": lambda: nn.Dropout(0.3),
    "noise drawn in layout": lambda: nn.Dropout(0.3, inplace=True),
    "pooling indices in bytes": lambda: nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 1, 1)),
    "made just before the backward pass reads it": Sine,
    "activation masks": lambda: nn.Sequential(nn.ReLU(), nn.Tanh()),
    "activation masks after other readers": lambda: nn.Sequential(nn.ReLU(), conv()),
}
OTHERS: tuple[Callable[[], nn.Module], ...] = (conv, nn.Tanh, lambda: nn.BatchNorm2d(8), nn.ReLU, nn.SiLU, nn.Softplus)


def sliced(draw: random.Random) -> Made:
    network = Network()
    graph = fx.Tracer().trace(network)
    return slice_graph(network, graph, region_of(graph, network, 0.75), 4, 2), torch.randn(4, 3, 8, 8)


def volumes(draw: random.Random) -> Made:
    return nn.Sequential(Level(3), nn.Tanh()), torch.randn(1, 2, 8, 8, 2 * draw.randrange(4, 7))


def levels_of(draw: random.Random) -> Made:
    dims = draw.choice((2, 3))
    return Level(dims), torch.randn(2, 2, *[8] * dims)


def residual(draw: random.Random) -> Made:
    return fused(draw.choice((1, 2))), torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)


NETWORKS: dict[str, Callable[[random.Random], Made]] = {
    "large weight gradients cut": lambda draw: (nn.Conv2d(8, 2 * draw.randrange(2, 6), 3), torch.randn(2, 8, 8, 8)),
    "gradients of parts added whole": lambda draw: (Dense(growth=draw.randrange(2, 5)), torch.randn(2, 3, 8, 8)),
    "fused norm gradients multiplied where read": residual,
    "fused norm gradients added while written": residual,
    "slices of norms just before they are read": sliced,
    "waiting parts copied": lambda draw: (Skipping(draw.randrange(12, 15), 4), torch.randn(2, 3, 8, 8)),
    "native convolutions": volumes,
    "parts read natively": volumes,
    "gradients of parts": volumes,
    "concatenations left out": levels_of,
}
_GRADIENTS = ("copies dropped", "convolution gradients split", "convolution inputs not saved")
# Rows without which another finds nothing.
NEEDED: dict[str, tuple[str, ...]] = {
    "batches counted at once": ("batches counted in place",),
    "convolution inputs not saved": ("convolution gradients split",),
    "written copies dropped": ("copies dropped",),
    "statistics moved in place": ("unread statistics not saved",),
    "gradients of parts added whole": ("copies dropped",),
    "activation masks": ("copies dropped",),
    "activation masks after other readers": ("copies dropped",),
    "parts read natively": (*_GRADIENTS, "native convolutions"),
    "gradients of parts": (*_GRADIENTS, "native convolutions", "parts read natively"),
    "concatenations left out": _GRADIENTS,
}
# Rows of networks that a transform made, whose kernels have other bits than eager PyTorch's before the row is applied.
OWN_BITS = {name for name, make in NETWORKS.items() if make in (residual, sliced)}
FLOAT32 = torch.float32
# What has to be so on this machine.
POSSIBLE: dict[str, Callable[[], bool]] = {
    "batch norm gradients in place": lambda: batch_norm.backward_repeats_bits(FLOAT32, FLOAT32, CPU, 4, 8, True),
    "group norm gradients in place": lambda: group_norm.backward_repeats_bits(FLOAT32, CPU, 4, 8, 2),
    "layer norm gradients in place": lambda: layer_norm.backward_repeats_bits(FLOAT32, FLOAT32, 12),
    **{name: lambda: bool(levels()) for name in ROWS if name.startswith("fused norm")},
    **dict.fromkeys(("native convolutions", "parts read natively", "gradients of parts"), direct_convolution.applies),
}


def made(row: str, draw: random.Random) -> Made:
    """A random network with sites of a row, and an input."""
    torch.manual_seed(draw.randrange(1 << 30))
    if row in NETWORKS:
        return NETWORKS[row](draw)
    layers = [draw.choice(OTHERS)() for _ in range(draw.randrange(3))]
    layers += [conv(), LAYERS[row](), conv(), *(draw.choice(OTHERS)() for _ in range(draw.randrange(3)))]
    images = torch.randn(2, 3, draw.randrange(6, 10), 12)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *layers)
    channels_last = draw.random() < 0.5 or row == "noise drawn in layout"
    if channels_last and row not in ("group norm gradients in place", "layer norm gradients in place"):
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, images


class Traced:
    """A model's joint graph as AOTAutograd hands it over, with the tensors to run it on."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.names = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
        self.x = x
        with pytest.MonkeyPatch.context() as patch, eager_kernels():
            patch.setattr("shoal.capture.capture_step.joint_step", self._joint_step)
            patch.setattr("shoal.capture.capture_step.capture", self._capture)
            captured = capture_step(model, x, name="net", rewrites=())[0]
        (self.result,) = captured.results

    def _joint_step(self, gm: fx.GraphModule, inputs: Any, places: InputPlaces, **options: Any) -> Captured:
        self.inputs = list(inputs)
        return joint_step(gm, inputs, places, **options)

    def _capture(self, joint: fx.GraphModule, n_forward_outputs: int, *args: Any, **options: Any) -> Captured:
        graph = fx.Graph()
        graph.output(graph.graph_copy(joint.graph, {}))
        graph.output_node().meta = dict(joint.graph.output_node().meta)
        outputs: Any = graph.output_node().args[0]
        forward = needed_by(outputs[:n_forward_outputs])
        backward = {node for node in graph.nodes if node.op == "call_function" and node not in forward}
        self.joint, self.n_forward = Joint(fx.GraphModule(joint, graph), backward), n_forward_outputs
        return capture(joint, n_forward_outputs, *args, **options)

    def results(self) -> dict[str, torch.Tensor]:
        """The output, gradients of parameters, and what buffers are after the step."""
        self.joint.graph.lint()
        module = fx.GraphModule(self.joint.module, self.joint.graph)
        torch.manual_seed(7)
        *_, tangent = module.graph.find_nodes(op="placeholder")
        value = tangent.meta["val"]
        outputs = run_joint(module, [*(value.detach() for value in self.inputs), weights(value.shape, value.stride())])
        found = {"output": outputs[self.result]}
        for value, gradient in zip(self.inputs, outputs[self.n_forward :], strict=False):
            if gradient is not None and id(value) in self.names:
                found[self.names[id(value)]] = gradient
        places = list(self.joint.graph.find_nodes(op="placeholder"))
        returned: Any = self.joint.graph.output_node().args[0]
        for node, value in changed_inputs(self.joint.graph):
            found[self.names[id(self.inputs[places.index(node)])]] = outputs[list(returned).index(value)]
        return found


def weights(shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """What the gradient of an output is: a random weight for each of its elements."""
    generator = torch.Generator().manual_seed(11)
    return torch.empty_strided(shape, stride).copy_(torch.randn(shape, generator=generator))


def plain(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of plain PyTorch."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(7)
    y = model(x)
    y.backward(weights(y.shape, y.stride()).to(y.dtype))
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"output": y.detach(), **gradients, **dict(model.named_buffers())}


def tanh_in_channels_last(node: fx.Node) -> torch.Tensor | None:
    """A kernel that lays its gradient out otherwise than its fake kernel: on the CPU there is none."""
    if node.target is not torch.ops.aten.tanh_backward.default:
        return None
    value = node.meta["val"]
    last = torch.channels_last if value.is_contiguous() else torch.contiguous_format
    return torch.empty_like(value, memory_format=last)


def apply(joint: Joint, name: str) -> int:
    """Apply one row to all of its sites; how many there were."""
    row = ROWS[name]
    chosen = [site.name for site in row.match(joint)] if row.by_choice else ()
    return rewrite(joint, [row], row.technique, chosen)


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "WORTH_PIECES_BYTES", 0)
    monkeypatch.setattr(activations, "_WORTH_A_MASK_BYTES", 0)
    monkeypatch.setattr(convolutions, "cut_of_large_weight", lambda *_: Cut(0, 2, 1))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ROWS)
def test_a_step_with_one_row_alone_gives_what_plain_pytorch_gives(name: str, seed: int) -> None:
    if name in POSSIBLE and not POSSIBLE[name]():
        pytest.skip("kernels of this machine give other bits, or were not built")
    row = ROWS[name]
    model, x = made(name, random.Random(f"{name} {seed}"))
    with ExitStack() as patched:
        if "cuDNN" in name:
            patched.enter_context(cudnn_on_the_cpu())
        patch = patched.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(buffers, "_LAUNCHES", ("cpu",))
        patch.setattr(layouts, "_as_run", tanh_in_channels_last)
        traced = Traced(model, x)
        for needed in NEEDED.get(name, ()):
            apply(traced.joint, needed)
        as_traced = traced.results() if name in OWN_BITS else {}
        assert apply(traced.joint, name), "the network has no site of the row"
        ours = traced.results()
    theirs = as_traced or plain(model, x)
    if row.guarantee == "bitwise":
        assert len(ours) > 1 and not [key for key, value in ours.items() if not same_bits(value, theirs[key])]
    else:
        assert not too_far(ours, theirs, plain(model.double(), x.double()))


def doubled_exponentials(joint: Joint) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
    """Sites of a toy: exp(x) * exp(x) is exp(2 x)."""
    for node in joint.find(torch.ops.aten.mul.Tensor):
        first, second = node.all_input_nodes * 2 if len(node.all_input_nodes) == 1 else node.all_input_nodes
        if first is second and first.target is torch.ops.aten.exp.default and node not in joint.backward:
            twice = joint.call(node, torch.ops.aten.mul.Scalar, (first.args[0], 2), first.meta["val"], node)
            yield node, torch.ops.aten.exp.default, (twice,)


def test_a_new_rewrite_is_a_row_and_nothing_else() -> None:
    toy = Rewrite("exponentials of the double", doubled_exponentials, call_instead, guarantee="exact")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Through(lambda x: x.exp() * x.exp()), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with_toy, without = (capture_step(model, x, name="net", rewrites=rows)[0] for rows in ((*TABLE, toy), TABLE))
    targets = [[op.target for op in step.graph.ops if op.phase == "forward"] for step in (with_toy, without)]
    assert [found.count("aten.mul.Tensor") for found in targets] == [0, 1]
    assert targets[0].count("aten.mul.Scalar") == 1
    tensors = operands(without.joint)
    for ours, theirs in zip(run_joint(with_toy.joint, tensors), run_joint(without.joint, tensors), strict=True):
        assert (ours is None and theirs is None) or torch.allclose(ours, theirs)


def test_every_row_has_a_name_of_its_own_and_a_technique_that_can_be_asked_for() -> None:
    assert len(ROWS) == len(TABLE) == len({*LAYERS, *NETWORKS})
    assert {row.technique for row in TABLE} <= LOSSY | {"", "compact"}
    assert {row.guarantee for row in TABLE if row.technique in BITWISE | {"", "compact"}} == {"bitwise"}


def test_a_plan_that_names_what_is_no_site_is_refused() -> None:
    traced = Traced(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4))
    with raising(PlanError, "'nothing'"):
        rewrite(traced.joint, TABLE, "direct", ["nothing"])
