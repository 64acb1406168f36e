from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal import codecs
from shoal.core.hardware import Link
from shoal.distributed.weights.host_weights import FirstUse, HostWeights
from shoal.distributed.weights.precision import AdaptivePrecision
from shoal.errors import CodecError, InputError, TransferError
from tests.raising import raising
from tests.ranks import run_on_ranks

SLOW = Link("slow", 20e6, 20e6, 1e-4)


class Tied(nn.Module):
    """A convolution, a batch norm, and a weight that two layers share and a third place reads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.apart = nn.Linear(8, 5)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        x = self.second(F.relu(self.first(x)))
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        return F.linear(x, self.apart.weight, self.apart.bias)  # past the module's own call


Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def batches(seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(6, 3, 6, 6, generator=draw), torch.randint(5, (6,), generator=draw)


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    micro: int = 1,
    scheduler: Any = None,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> list[float]:
    """An ordinary training loop."""
    data = data or batches()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            images, labels = next(data)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def made(kind: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    if kind == "adam":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def hosted() -> Iterator[Callable[..., HostWeights]]:
    made: list[HostWeights] = []

    def host(*args: Any, **kwargs: Any) -> HostWeights:
        made.append(HostWeights(*args, **kwargs))
        return made[-1]

    yield host
    for weights in made:
        weights.close()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("micro", [1, 2])
def test_32_bits_train_as_plain_pytorch_does_bit_for_bit(kind: str, micro: int, hosted: Any) -> None:
    plain, optimizer = made(kind)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    expected = run(plain, optimizer, 6, micro=micro, scheduler=schedule)
    model, optimizer = made(kind)
    hosted(model, optimizer, rehearse=SLOW)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    assert run(model, optimizer, 6, micro=micro, scheduler=schedule) == expected
    assert same(model.state_dict(), plain.state_dict())


def test_the_device_computes_with_truncated_weights_and_the_masters_stay_exact(hosted: Any) -> None:
    model, optimizer = made()
    weights = hosted(model, optimizer, precision=8)
    run(model, optimizer, 3)
    weights.wait()
    codec = codecs.get("truncate1")
    masters = model.state_dict()
    for name, parameter in model.named_parameters():
        exact = masters[name]
        sent = codec.decode(codec.encode(exact)) if parameter.dim() > 1 else exact
        assert torch.equal(parameter, sent), name
    assert not torch.equal(model.conv.weight, masters["conv.weight"])


def test_one_byte_may_be_another_type_of_8_bits_until_awp_widens(hosted: Any) -> None:
    model, optimizer = made()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.01, 5.0  # norms fall 5 % a step
    precision = AdaptivePrecision(model, threshold=-0.02, interval=2)
    weights = hosted(model, optimizer, precision=precision, rounding="nearest", one_byte="dynamic_tree")
    data = batches()
    for step in range(3):
        run(model, optimizer, 1, data=data)
        weights.wait()
        codec = codecs.get("dynamic_tree" if step < 2 else "round2")
        assert precision.bytes_of("conv.weight") == (1 if step < 2 else 2)
        for name, exact in model.state_dict().items():
            if precision.watches(name):
                assert torch.equal(dict(model.named_parameters())[name], codec.decode(codec.encode(exact))), name
    assert weights.traffic.total("weights").sent_bytes < weights.traffic.total("weights").raw_bytes


def test_a_step_with_few_bits_is_the_step_at_the_truncated_weights(hosted: Any) -> None:
    reference, _ = made()
    codec = codecs.get("round2")
    exact = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.copy_(codec.decode(codec.encode(parameter)))
    images, labels = next(batches())
    F.cross_entropy(reference(images), labels).backward()
    model, optimizer = made()
    weights = hosted(model, optimizer, precision=16, rounding="nearest")
    F.cross_entropy(model(images), labels).backward()
    for (name, expected), master in zip(reference.named_parameters(), weights.parameters(), strict=True):
        assert torch.equal(master.grad, expected.grad), name
    for before, master in zip(exact.parameters(), weights.parameters(), strict=True):
        assert torch.equal(before, master)


def test_bytes_are_counted_exactly(hosted: Any) -> None:
    model, optimizer = made()
    weights = hosted(model, optimizer, precision="bf16", gradients="dynamic_tree")
    run(model, optimizer, 2)
    sizes = [(parameter.numel(), parameter.dim() > 1) for parameter in model.parameters()]
    raw = 4 * sum(elems for elems, _ in sizes)
    sent = sum(2 * elems if packs else 4 * elems for elems, packs in sizes)
    eight = codecs.get("dynamic_tree")
    gradients = sum(eight.payload_bytes(elems) if packs else 4 * elems for elems, packs in sizes)
    assert weights.traffic.last_step("weights") == type(weights.traffic.last_step())(sent, raw)
    assert weights.traffic.last_step("gradients").sent_bytes == gradients
    assert "bf16" in weights.explain()


def test_adaptive_precision_widens_layers_whose_norm_falls(hosted: Any) -> None:
    model, optimizer = made()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.01, 5.0  # norms fall 5 % a step
    precision = AdaptivePrecision(model, threshold=-0.02, interval=2)
    weights = hosted(model, optimizer, precision=precision)
    widths = []
    data = batches()
    for _ in range(7):
        run(model, optimizer, 1, data=data)
        widths.append(precision.bytes_of("conv.weight"))
    assert widths == sorted(widths) and widths[0] == 1 and widths[-1] == 4
    sent = weights.traffic.last_step("weights")
    assert sent.sent_bytes < sent.raw_bytes or set(precision.bits.values()) == {32}


@pytest.mark.parametrize("precision", [8, "adaptive"])
def test_a_checkpoint_resumes_bit_for_bit(precision: int | str, hosted: Any) -> None:
    def begun() -> tuple[nn.Module, torch.optim.Optimizer, HostWeights]:
        model, optimizer = made()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
        width = AdaptivePrecision(model, threshold=-1e-3, interval=2) if precision == "adaptive" else precision
        return model, optimizer, hosted(model, optimizer, precision=width)

    model, optimizer, weights = begun()
    data = batches()
    run(model, optimizer, 4, data=data)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), weights.state_dict()), file)
    expected = run(model, optimizer, 4, data=data)
    resumed, its_optimizer, its_weights = begun()
    file.seek(0)
    states = torch.load(file, weights_only=True)
    resumed.load_state_dict(states[0])
    its_optimizer.load_state_dict(states[1])
    its_weights.load_state_dict(states[2])
    data = batches()
    for _ in range(4):
        next(data)
    assert run(resumed, its_optimizer, 4, data=data) == expected
    assert same(resumed.state_dict(), model.state_dict())
    assert its_weights.state_dict() == weights.state_dict()


def test_evaluation_and_batch_norm_go_on_as_ever(hosted: Any) -> None:
    plain, optimizer = made()
    run(plain, optimizer, 3)
    images, _ = next(batches(1))
    with torch.no_grad():
        expected = plain.eval()(images)
    model, optimizer = made()
    hosted(model, optimizer)
    run(model, optimizer, 3)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), expected)


def test_closing_gives_the_exact_weights_and_the_optimizer_back(hosted: Any) -> None:
    plain, optimizer = made()
    expected = run(plain, optimizer, 6)
    model, optimizer = made()
    weights = hosted(model, optimizer)
    data = batches()
    losses = run(model, optimizer, 3, data=data)
    weights.close()
    weights.close()
    assert optimizer.param_groups[0]["params"][0] is model.conv.weight
    assert losses + run(model, optimizer, 3, data=data) == expected


def test_a_partial_load_keeps_the_other_masters_exact(hosted: Any) -> None:
    model, optimizer = made()
    hosted(model, optimizer, precision=8)
    run(model, optimizer, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({"apart.bias": torch.ones(5)}, strict=False)
    after = model.state_dict()
    assert torch.equal(after.pop("apart.bias"), torch.ones(5))
    before.pop("apart.bias")
    assert same(after, before)


def test_a_backward_pass_of_weights_that_are_gone_is_refused(hosted: Any) -> None:
    model, optimizer = made()
    hosted(model, optimizer)
    images, labels = next(batches())
    loss = F.cross_entropy(model(images), labels)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_pass_that_raised_is_no_order(hosted: Any) -> None:
    plain, optimizer = made()
    expected = run(plain, optimizer, 3)
    model, optimizer = made()
    hosted(model, optimizer)
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 4, 6, 6))
    assert run(model, optimizer, 3) == expected


def test_nan_gradients_stay_nan(hosted: Any) -> None:
    model, optimizer = made()
    weights = hosted(model, optimizer, gradients="dynamic_tree")
    (model(next(batches())[0]) * float("nan")).sum().backward()
    assert all(torch.isnan(master.grad).any() for master in weights.parameters() if master.grad is not None)


def test_weights_in_any_memory_format_and_as_views(hosted: Any) -> None:
    def network() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        whole = torch.randn(10, 64) * 0.1
        model[3].weight = nn.Parameter(whole[::2])
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plain, optimizer = network()
    expected = run(plain, optimizer, 3)
    model, optimizer = network()
    weights = hosted(model, optimizer)
    assert run(model, optimizer, 3) == expected
    assert weights.parameters()[0].is_contiguous(memory_format=torch.channels_last)


def test_what_cannot_be_hosted_is_refused(hosted: Any) -> None:
    model, optimizer = made()
    with raising(InputError, "precision=12"):
        hosted(model, optimizer, precision=12)
    with raising(InputError, "rounding='up'"):
        hosted(model, optimizer, rounding="up")
    with pytest.raises(CodecError):
        hosted(model, optimizer, precision="bf17")
    with raising(InputError, "one_byte='bf16'"):
        hosted(model, optimizer, precision=8, one_byte="bf16")
    with pytest.raises(InputError):
        hosted(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with raising(InputError, "float32"):
        half = nn.Linear(2, 2).half()
        hosted(half, torch.optim.SGD(half.parameters(), lr=0.1))
    weights = hosted(model, optimizer)
    with pytest.raises(InputError):
        optimizer.step(lambda: 0.0)
    with pytest.raises(InputError):
        weights.load_state_dict({"adaptive": AdaptivePrecision(model, -1.0, 1).state_dict()})
    with pytest.raises(InputError):
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize("compiled", [torch.compile, lambda net: net.compile() or net, lambda net: shoal.compile(net)])
def test_a_compiled_model_is_refused(compiled: Callable[[nn.Module], nn.Module], hosted: Any) -> None:
    model, optimizer = made()
    with pytest.raises(InputError):
        hosted(compiled(model), optimizer)


def test_a_model_that_is_compiled_later_is_refused_when_it_is_called(hosted: Any) -> None:
    model, optimizer = made()
    hosted(model, optimizer)
    with pytest.raises(InputError):
        torch.compile(model, backend="eager")(next(batches())[0])


def test_parameters_that_were_replaced_since_are_refused(hosted: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    hosted(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0] = nn.Linear(4, 2)
    with pytest.raises(InputError):
        model(torch.ones(3, 4))


def refusals() -> list[str]:
    """By HostWeights of what is wrapped before and after, on one of several ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = []

    def refused(begin: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
        model = nn.Sequential(nn.Linear(4, 2))
        try:
            begin(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except InputError as error:
            found.append("refused" if len(str(error).splitlines()[0]) <= 160 else str(error))

    def sharded(model: nn.Module) -> nn.Module:
        return fully_shard(model)

    for wrap in (DistributedDataParallel, sharded):
        refused(lambda model, optimizer, wrap=wrap: HostWeights(wrap(model), optimizer))
        refused(lambda model, optimizer, wrap=wrap: (HostWeights(model, optimizer), wrap(model)(torch.ones(3, 4))))
    return found


def test_ddp_and_fsdp_are_refused_in_either_order() -> None:
    assert run_on_ranks(refusals, 2) == [["refused"] * 4] * 2


def test_a_link_that_was_closed_ends_in_a_clear_error(hosted: Any) -> None:
    model, optimizer = made()
    weights = hosted(model, optimizer)
    run(model, optimizer, 1)
    weights._link.close()
    with pytest.raises(TransferError):
        run(model, optimizer, 2)
    weights._handles = []  # nothing left to put back


def test_first_use_tells_what_a_module_reads_past_another_modules_call() -> None:
    model = Tied()
    watch = FirstUse(model.parameters())
    handles = [
        module.register_forward_pre_hook(lambda module, inputs: watch.announce(module.parameters(recurse=False)))
        for module in model.modules()
    ]
    with watch:
        model(torch.randn(2, 3, 6, 6))
    for handle in handles:
        handle.remove()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in watch.order][:2] == ["conv.weight", "conv.bias"]
    assert {names[id(parameter)] for parameter in watch.early} == {
        "apart.weight",
        "apart.bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
    }
