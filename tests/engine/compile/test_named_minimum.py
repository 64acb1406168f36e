"""A minimum that is named runs in the ordinary loop, and what does not fit is refused before a weight changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from bench.fuzz_step import allocated
from shoal.engine.calls import Call
from shoal.engine.iteration.metered import Iteration
from shoal.engine.session import Session
from shoal.errors import BudgetError
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes
from tests.engine.training_laws import needs_compiler

pytestmark = needs_compiler  # the loss is metered only with one
Loss = Callable[[Any], torch.Tensor]
TOO_LITTLE = 300_000


class Views(nn.Module):
    """Returns its result, larger than all that it saves, as that many views of one storage."""

    def __init__(self, views: int, last: nn.Module | None = None) -> None:
        super().__init__()
        self.views = views
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 32, 3, 1, 1), last or nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.layers(x)
        return [y, y.flatten(1), y.transpose(0, 1), y[:1]][: self.views]


def train(net: nn.Module, budget: int, loss_of: Loss, steps: int = 3, reads_all: bool = False) -> nn.Module:
    """The ordinary loop: result and loss of a step are held until the next one has its own."""
    torch._dynamo.reset()
    batch = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    shoal.compile(net, budget=budget, optimizer=optimizer, allow="recompute, order")
    for _ in range(steps):
        outputs = net(batch)
        loss = loss_of(outputs if reads_all else outputs[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def refused(net: nn.Module, budget: int, loss_of: Loss, reads_all: bool = False) -> int:
    """What the error names; no weight has changed."""
    trained = copy.deepcopy(net)
    with pytest.raises(BudgetError) as error:
        train(trained, budget, loss_of, reads_all=reads_all)
    assert all(map(torch.equal, trained.parameters(), net.parameters()))
    assert error.value.least_feasible_bytes is not None
    return error.value.least_feasible_bytes


@pytest.mark.parametrize(("views", "loss_of"), [(4, lambda y: y.pow(2).mean()), (1, lambda y: ((y - 1) ** 2).mean())])
def test_what_is_named_runs(views: int, loss_of: Loss) -> None:
    named = refused(Views(views), TOO_LITTLE, loss_of)
    assert train(Views(views), named, loss_of).shoal.measured_peak_bytes <= named


def test_what_is_named_runs_where_the_loss_reads_views_of_one_storage() -> None:
    """It keeps what it needs of each, and computes the gradient of each."""

    def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
        return sum((one.abs().square().mean() for one in outputs), start=torch.zeros(()))

    named = refused(Views(4), TOO_LITTLE, loss_of, reads_all=True)
    assert train(Views(4), named, loss_of, reads_all=True).shoal.measured_peak_bytes <= named


def frozen_chain() -> nn.Module:
    """In some of its variants it fits in what is named if the loop drops the result; on slices in any case."""
    torch.manual_seed(0)
    sizes = (3, 16, 16)
    blocks = [
        layer
        for before, after in pairwise(sizes)
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after).eval(), nn.ReLU())
    ]
    net = nn.Sequential(*blocks, nn.Conv2d(16, 4, 3, padding=1))
    return net


@pytest.mark.slow
@pytest.mark.usefixtures("few_variants")
def test_what_is_named_is_met_by_the_first_step_of_a_loop_that_holds_its_result() -> None:
    """Also where a faster variant would fit in a loop that does not."""
    x = torch.randn(8, 3, 24, 24)
    with pytest.raises(BudgetError) as error:
        shoal.compile(frozen_chain(), 20_000, optimizer="sgd", allow="exact")(x)
    named = error.value.least_feasible_bytes
    assert named is not None
    model = shoal.compile(frozen_chain(), named, optimizer="sgd", allow="exact")
    for _ in range(3):
        model.zero_grad()
        y = model(x)
        y.sum().backward()
        assert model.shoal.repairs == 0
    assert model.shoal.measured_peak_bytes <= named


class Twice(nn.Module):
    """Returns its result as it is and rectified. On slices it takes less than unmodified, in any loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
            nn.Conv2d(16, 8, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layers(x)
        return y, y.flatten(1), F.relu(y)


@pytest.mark.slow
@pytest.mark.usefixtures("few_variants")
def test_what_is_named_once_the_loss_is_known_runs_in_the_variant_that_is_chosen_for_it() -> None:
    """The choice is made before the loss is known: with the budget that slices need it is the step as it is written."""
    x = torch.randn(6, 3, 20, 20, generator=torch.Generator().manual_seed(0))

    def steps(budget: int) -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Twice()
        optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
        shoal.compile(net, budget=budget, optimizer=optimizer, allow="exact")
        for _ in range(2):
            outputs = net(x)
            outputs = *outputs, outputs[0]
            loss = sum((one.abs().square().mean() for one in outputs), start=torch.zeros(()))
            loss.backward()
            del outputs, loss
            optimizer.step()
            optimizer.zero_grad()
        return net

    def named(budget: int) -> int:
        try:
            steps(budget)
        except BudgetError as error:
            assert error.least_feasible_bytes is not None
            return error.least_feasible_bytes
        return budget

    unknown = named(TOO_LITTLE)
    held = named(int(0.52 * unknown))
    assert held <= unknown
    assert named(held) == held


def test_a_loss_that_takes_more_than_is_assumed_is_refused_before_a_weight_changes() -> None:
    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return F.multilabel_soft_margin_loss(y, torch.ones_like(y))

    named = refused(Views(1), TOO_LITTLE, loss_of)
    enough = refused(Views(1), named, loss_of)
    assert train(Views(1), enough, loss_of).shoal.measured_peak_bytes <= enough


@pytest.mark.parametrize("last", [nn.ReLU(), nn.Identity()])
def test_a_result_that_is_held_is_seen_in_the_first_step(last: nn.Module) -> None:
    """A plan that hopes that the loop drops it is refused when the loss is known, though the backward pass reads it."""

    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return y.sum()

    unknown = refused(Views(1, last), TOO_LITTLE, loss_of)
    held = refused(Views(1, last), 45 * unknown // 100, loss_of)  # half would do for this loss
    assert held <= unknown
    assert train(Views(1, last), held, loss_of).shoal.measured_peak_bytes <= held


@pytest.mark.parametrize("dropped", [False, True])
def test_a_result_that_is_a_view_of_what_the_graph_returns_is_seen_to_be_held(
    monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    """AOTAutograd makes a new tensor of it."""
    seen: list[int] = []

    def foresee(session: Session, iteration: Iteration, call: Call) -> None:
        seen.append(sum(call.outputs[place].nbytes for place in call.held_by_caller()))

    monkeypatch.setattr(Session, "foresee", foresee)
    net = shoal.compile(nn.Linear(32, 32), budget="1GiB")
    result = net(torch.randn(2, 8, 32))
    loss = result.sum()
    expected = 0 if dropped else result.nbytes
    if dropped:
        del result
    loss.backward()
    assert seen == [expected]


class WithLoss(nn.Module):
    """Computes its loss itself, as models of transformers do, and returns the logits with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, 0.0)
        self.head = nn.Linear(32, 128)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.block(self.embedding(words)))
        return F.cross_entropy(logits.flatten(0, 1), words.flatten()), logits


WORDS = torch.arange(512).view(16, 32) % 128
LOGITS_BYTES = WORDS.numel() * 128 * 4


def train_on_words(net: nn.Module, steps: int = 3, with_logits: bool = False) -> None:
    """The ordinary loop, in which loss and logits are held until the next step has its own."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        loss, logits = net(WORDS)
        if with_logits:
            loss = loss + ((logits - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def named_for_words(net: nn.Module, budget: int, with_logits: bool = False) -> int:
    torch._dynamo.reset()
    trained = copy.deepcopy(net)
    with pytest.raises(BudgetError) as error:
        train_on_words(shoal.compile(trained, budget=budget), with_logits=with_logits)
    assert all(map(torch.equal, trained.parameters(), net.parameters()))
    assert error.value.least_feasible_bytes is not None
    return error.value.least_feasible_bytes


@pytest.mark.parametrize("with_logits", [False, True])
def test_what_is_named_for_a_model_that_computes_its_loss_is_at_most_what_plain_pytorch_takes(
    with_logits: bool,
) -> None:
    net, plain = WithLoss(), WithLoss()
    there_bytes = distinct_bytes([*plain.parameters(), WORDS])
    _, changes = allocations.record(lambda: train_on_words(plain, with_logits=with_logits))
    named = named_for_words(net, there_bytes + 100, with_logits)
    if with_logits:  # a second loss, which reads the logits, is seen before a weight changes
        named = named_for_words(net, named, with_logits)
    assert named <= there_bytes + allocations.peak_bytes(changes)
    torch._dynamo.reset()
    shoal.compile(net, budget=named)
    train_on_words(net, with_logits=with_logits)
    assert net.shoal.measured_peak_bytes <= named


def test_with_room_a_model_that_computes_its_loss_holds_no_gradient_of_the_logits() -> None:
    """Autograd's zeros for the gradient of the logits are not there while the loss is differentiated."""
    plain, net = WithLoss(), shoal.compile(WithLoss(), budget="1GiB", allow="recompute")
    there_bytes = distinct_bytes([*plain.parameters(), WORDS])
    _, changes = allocations.record(lambda: train_on_words(plain))
    train_on_words(net)
    assert net.shoal.measured_peak_bytes < there_bytes + allocations.peak_bytes(changes) + LOGITS_BYTES // 2
    assert net.shoal.predicted_peak_bytes == pytest.approx(net.shoal.measured_peak_bytes, rel=0.02)


@pytest.mark.parametrize("loss_of", [lambda loss, logits: loss, lambda loss, logits: loss + logits.square().mean()])
def test_gradients_are_those_of_plain_pytorch_whatever_the_loop_makes_of_the_logits(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    torch._dynamo.reset()
    plain = WithLoss()
    net = shoal.compile(copy.deepcopy(plain), budget="1GiB", allow="recompute")
    for model in (plain, net, net):
        model.zero_grad()
        loss_of(*model(WORDS)).backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in plain.parameters())))


READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda y: y.split(16),
    "columns": lambda y: y.chunk(4, 1),
    "unbound": lambda y: y.view(64, 2, 32).unbind(1),
    "strided": lambda y: y.as_strided((16, 8), (64, 1)),
    "windows": lambda y: y.unfold(1, 8, 4),
    "padded": lambda y: F.pad(y.view(1, 4, 16, 64), (1, 1, 2, 1), mode="circular"),
    "shrunk": lambda y: F.softshrink(y, 0.1),
    "hard": lambda y: F.hardshrink(y, 0.1),
    "margin": lambda y: F.multi_margin_loss(y, torch.arange(64)),
    "margins": lambda y: F.multilabel_margin_loss(y, torch.arange(64).expand(64, 64)),
    "pooled": lambda y: F.max_pool1d(y.T[None], 3, 1),
}


@pytest.mark.parametrize("read", READ)
def test_plain_pytorchs_own_peak_is_enough(read: str) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> Any:
            return READ[read](self.layer(x))

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def step(net: nn.Module) -> None:
        results = net(x)
        results = results if isinstance(results, tuple) else (results,)
        sum((one.square().sum() for one in results), start=torch.zeros(())).backward()
        net.zero_grad()

    plain = Read()
    step(plain)
    held_bytes = x.nbytes + sum(one.nbytes for one in plain.parameters())
    plain_bytes = held_bytes + allocated(lambda: step(plain))[1]
    torch._dynamo.reset()
    net = shoal.compile(Read(), budget=plain_bytes + 1024, optimizer="sgd", allow="exact")  # small tensors of the loop
    for _ in range(3):
        step(net)
    assert net.shoal.measured_peak_bytes <= plain_bytes + 1024


def test_a_gradient_of_the_result_that_is_a_parameters_too_counts_in_a_plan_for_a_loop_that_holds_less() -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(1 << 12) for _ in range(3))

        def forward(self) -> torch.Tensor:
            return self.weights[0] - self.weights[1] * self.weights[2]

    weight = torch.rand(1 << 12)

    def step(net: nn.Module) -> None:
        (net() * weight).sum().backward()
        net.zero_grad()

    plain = Difference()
    step(plain)
    plain_bytes = 4 * weight.nbytes + allocated(lambda: step(plain))[1]
    torch._dynamo.reset()
    net = shoal.compile(Difference(), budget=plain_bytes, optimizer="sgd", allow="exact")
    for _ in range(3):
        step(net)
    assert net.shoal.measured_peak_bytes <= net.shoal.predicted_peak_bytes <= plain_bytes


class Bags(nn.Module):
    """Its backward pass needs scratch for the rows of bags that are not empty."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(50, 64, mode="max"), nn.Linear(64, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.bags(words)))


def test_what_is_named_for_embedding_bags_runs() -> None:
    words = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0))
    with pytest.raises(BudgetError) as error:
        shoal.compile(Bags(), 60_000, optimizer="sgd")(words)
    named = error.value.least_feasible_bytes
    assert named is not None
    model = shoal.compile(Bags(), named, optimizer="sgd")
    for _ in range(3):
        model(words).square().mean().backward()
        model.zero_grad()
    status = model.shoal
    assert status.repairs == 0
    assert status.measured_peak_bytes <= min(named, 1.02 * status.predicted_peak_bytes)
