"""Training with encoded convolution inputs: the same forward pass, near gradients, the peak that was promised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.plan import Plan
from shoal.core.residence import Encode, Offload
from shoal.engine.backend import backend
from shoal.errors import BudgetError, CodecError, InputError, PlanError
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes
from shoal.transforms.split.split import split
from tests.engine.keywords import keywords
from tests.engine.lossy_steps import chain, codecs_of_no_time, plan_encoding_everything
from tests.engine.training_laws import images, mean_square, needs_compiler, same_bits, train

WIDTHS = (3, 16, 16, 16, 16)
ENCODE = "bitwise, encode"


def trained(
    model: nn.Module, batches: list[Any], codec: str = "dynamic_tree", seed: int | None = None, **how: Any
) -> tuple[Any, Any, Any]:
    """A planned copy that encodes all it may, what it and a plain copy leave."""
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    plan = plan_encoding_everything(copy.deepcopy(model), batches[0], codec, seed=seed)
    shoal.compile(planned, offload_to=None, options=shoal.Options(plan=plan))
    found = train(planned, batches, **how)
    assert planned.shoal.plan.encoded
    return planned, found, train(plain, batches, **how)


def first_gradients(trace: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in trace.items() if name.startswith("0: gradient")}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 0.02) -> None:
    """The first step's outputs keep their bits, and gradients differ by little: of weights, if at all."""
    assert same_bits(found["0: loss"], expected["0: loss"])
    differing = 0
    for name, exact in first_gradients(expected).items():
        ours = first_gradients(found)[name]
        differing += not same_bits(ours, exact)
        assert same_bits(ours, exact) or (exact.dim() > 2 and (ours - exact).norm() <= share * exact.norm()), name
    assert differing, "the test shows nothing: nothing was lost"


@pytest.mark.parametrize(
    "model",
    [
        lambda: chain(*WIDTHS),
        lambda: chain(*WIDTHS, act=nn.ReLU6),
        lambda: chain(*WIDTHS).to(memory_format=torch.channels_last),
        lambda: nn.Sequential(*chain(3, 8, 8), nn.Dropout(0.3)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
    ],
    ids=["plain", "clipped", "channels last", "dropout at the end", "dropout and batch norm"],
)
def test_the_first_step_keeps_its_loss_and_errs_in_weight_gradients_alone(model: Callable[[], nn.Module]) -> None:
    _, found, expected = trained(model(), images(2, 4, 3, 16, 16))
    assert_near(found, expected)
    assert all(same_bits(found[name], expected[name]) for name in expected if "generator" in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=dtype)

    model, batches = chain(*WIDTHS), images(2, 4, 3, 16, 16)
    with autocast():
        plan = plan_encoding_everything(copy.deepcopy(model), batches[0])
    assert all(storage.dtype == str(dtype).removeprefix("torch.") for storage in plan.encoded)
    planned = shoal.compile(copy.deepcopy(model), offload_to=None, options=shoal.Options(plan=plan))
    how: Any = {"around_forward": autocast, "scaled": dtype == torch.float16}
    found, expected = train(planned, batches, **how), train(model, batches, **how)
    assert_near(found, expected, share=0.03)


def test_stochastic_rounding_repeats_itself_and_differs_by_seed() -> None:
    model, batches = chain(*WIDTHS), images(3, 4, 3, 16, 16)
    results = [trained(model, batches, "linear", seed)[1] for seed in (1, 1, 2)]
    weight = "0: gradient of 2.weight"
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])
    assert not same_bits(results[0][weight], results[2][weight])


def test_gradients_accumulate_and_a_shared_weight_gets_both() -> None:
    shared = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), shared, nn.ReLU(), shared, nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    _, found, expected = trained(model, images(4, 4, 3, 16, 16), batches_a_step=2)
    assert_near(found, expected)
    assert not same_bits(found["0: gradient of 2.weight"], expected["0: gradient of 2.weight"])


def large_enough() -> tuple[nn.Module, list[torch.Tensor]]:
    return chain(3, 16, 16, 16, 16, 16, 16).to(memory_format=torch.channels_last), [
        x.to(memory_format=torch.channels_last) for x in images(3, 8, 3, 48, 48)
    ]


def peak_of_a_step(model: nn.Module, batch: torch.Tensor) -> int:
    def step() -> None:
        mean_square(model(batch)).backward()

    model.zero_grad()
    resident_bytes = distinct_bytes([*model.parameters(), *model.buffers(), batch])
    return resident_bytes + allocations.peak_bytes(allocations.record(step)[1])


@pytest.mark.slow
@needs_compiler
def test_inside_a_budget_the_measured_peak_is_the_predicted_one() -> None:
    net, batches = large_enough()
    budget = int(0.5 * peak_of_a_step(copy.deepcopy(net), batches[0]))
    with codecs_of_no_time():
        planned = shoal.compile(
            copy.deepcopy(net), budget=budget, allow=ENCODE, options=shoal.Options(codec_block=2048)
        )
        found = train(planned, batches)
    status = planned.shoal
    assert status.plan.encoded and status.repairs == 0
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert max(status.measured_peak_bytes, peak_of_a_step(planned, batches[0])) <= budget
    assert_near(found, train(net, batches))
    assert status.plan.errors_measured and all(0 < error < 0.05 for error in status.plan.errors.values())


@pytest.mark.slow
@needs_compiler
def test_encoding_makes_the_faster_plan_and_the_exact_one_where_there_is_room() -> None:
    net, batches = large_enough()
    plain = peak_of_a_step(copy.deepcopy(net), batches[0])
    with codecs_of_no_time():
        exact = shoal.plan(net, batches[0], int(0.5 * plain), allow="bitwise")
        lossy = shoal.plan(net, batches[0], int(0.5 * plain), allow=ENCODE)
        roomy = shoal.plan(net, batches[0], 2 * plain, allow=ENCODE)
    assert lossy.encoded and lossy.predicted_seconds < exact.predicted_seconds
    assert lossy.plain_seconds == pytest.approx(exact.plain_seconds)
    assert lossy.plain_peak_bytes == exact.plain_peak_bytes
    assert lossy.predicted_peak_bytes <= lossy.budget_bytes
    assert not roomy.encoded and roomy == shoal.plan(net, batches[0], 2 * plain, allow="bitwise")


@needs_compiler
def test_payloads_are_offloaded_as_they_are(tmp_path: Path) -> None:
    net, batches = large_enough()
    plan = plan_encoding_everything(copy.deepcopy(net), batches[0])
    graph = plan.graph
    residences = dict(plan.residences)
    for residence in plan.residences.values():
        if isinstance(residence, Encode):
            payload = graph.storage_called[residence.payload]
            readers = [graph.ops[op] for op in graph.readers[payload.id]]
            residences[payload.name] = Offload(graph.ops[graph.producer[payload.id]].name, readers[0].name)
    sent = Plan(graph, residences, "by hand", exact_graph=plan.exact_graph)
    assert sent.host_bytes >= plan.payload_bytes
    planned = shoal.compile(copy.deepcopy(net), offload_to=tmp_path, options=shoal.Options(plan=sent))
    kept = shoal.compile(copy.deepcopy(net), offload_to=None, options=shoal.Options(plan=plan))
    found, expected = train(planned, batches[:2]), train(kept, batches[:2])
    assert all(same_bits(found[name], expected[name]) for name in expected)
    assert planned.shoal.plan.offloaded
    assert f"{len(plan.encoded)} storages" in planned.shoal.plan.explain()
    planned.zero_grad()


@pytest.mark.slow
@needs_compiler
def test_a_short_last_batch_and_eval_mode() -> None:
    net, batches = large_enough()
    batches[-1] = batches[-1][:5]
    plain_bytes = peak_of_a_step(copy.deepcopy(net), batches[0])
    with codecs_of_no_time():
        planned = shoal.compile(copy.deepcopy(net), budget=int(0.6 * plain_bytes), allow=ENCODE)
        found = train(planned, batches)
    assert planned.shoal.plan.encoded and len(planned.shoal.plans) == 2
    assert_near(found, train(copy.deepcopy(net), batches))
    planned.eval(), net.eval()
    net.load_state_dict(planned.state_dict())
    assert same_bits(planned(batches[0]), net(batches[0]))


@pytest.mark.slow
def test_drawn_cuts_are_encoded_like_any_other_size() -> None:
    torch.manual_seed(0)
    net = split(chain(3, 8, 8, 8), 0.7, grid=(2, 1), stochastic=0.3)
    plain, batches = copy.deepcopy(net), images(2, 4, 3, 32, 32)
    with codecs_of_no_time():
        peak = shoal.plan(copy.deepcopy(net), batches[0]).predicted_peak_bytes
        planned = shoal.compile(net, budget=int(0.8 * peak), allow=ENCODE)
        for number, batch in enumerate(batches):
            outputs = []
            for model in (planned, plain):
                model.zero_grad()
                torch.manual_seed(number)
                outputs.append(model(batch))
                mean_square(outputs[-1]).backward()
            assert same_bits(*outputs)
            for one, other in zip(planned.parameters(), plain.parameters(), strict=True):
                assert (one.grad - other.grad).norm() <= 0.02 * other.grad.norm()
    assert planned.shoal.plan.encoded


def test_a_saved_plan_encodes_the_same(tmp_path: Path) -> None:
    net, batches = chain(*WIDTHS), images(2, 4, 3, 16, 16)
    plan = plan_encoding_everything(copy.deepcopy(net), batches[0], "linear", block_elems=0, seed=4)
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan and loaded.encoded == plan.encoded and loaded.errors == plan.errors
    results = []
    for one in (plan, loaded):
        planned = shoal.compile(copy.deepcopy(net), offload_to=None, options=shoal.Options(plan=one))
        results.append(train(planned, batches))
        assert planned.shoal.plan.residences == plan.residences
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])
    other = shoal.compile(chain(3, 8, 8), offload_to=None, options=shoal.Options(plan=loaded))
    with pytest.raises(PlanError):
        other(batches[0])


@needs_compiler
def test_what_an_earlier_run_encoded_is_chosen_again() -> None:
    net, batches = large_enough()
    budget = int(0.6 * peak_of_a_step(copy.deepcopy(net), batches[0]))
    with codecs_of_no_time():
        first = shoal.compile(copy.deepcopy(net), budget=budget, allow=ENCODE, options=shoal.Options(codec="linear"))
        expected = train(first, batches)
    assert any(first.shoal.encoded.values())
    again = shoal.compile(
        copy.deepcopy(net), budget=budget, allow=ENCODE, options=shoal.Options(codec="linear")
    )  # by times that would choose otherwise
    again.shoal.encoded.update(first.shoal.encoded)
    found = train(again, batches)
    assert again.shoal.encoded == first.shoal.encoded
    assert all(same_bits(found[name], expected[name]) for name in expected)


@needs_compiler
def test_as_an_option_of_torch_compile() -> None:
    net, batches = large_enough()
    budget = int(0.6 * peak_of_a_step(copy.deepcopy(net), batches[0]))
    plain = copy.deepcopy(net)
    with codecs_of_no_time():
        compiled = torch.compile(net, backend=backend, options={"budget": budget, "allow": ENCODE, "codec": "linear"})
        outputs = compiled(batches[0])
        mean_square(outputs).backward()
    mean_square(plain(batches[0])).backward()
    off = [(a.grad - b.grad).norm() / b.grad.norm() for a, b in zip(net.parameters(), plain.parameters(), strict=True)]
    assert 0 < max(off) < 0.02


def test_too_small_a_budget_is_told_with_the_least_that_would_do() -> None:
    net, batch = chain(3, 16, 16, 16, 16), images(1, 8, 3, 32, 32)[0]
    with pytest.raises(BudgetError):
        shoal.plan(net, batch, "200KiB", allow=ENCODE)


@pytest.mark.parametrize(
    ("how", "error", "complaint"),
    [
        ({"codec": "dynamic_three"}, CodecError, "codec='dynamic_three' is unknown; type one of dynamic_tree, "),
        ({"codec": "one_bit"}, CodecError, "codec='one_bit' is not for activations; type one of dynamic_tree, "),
        ({"codec": "truncate2"}, CodecError, "is not for activations"),
        ({"codec": 8}, CodecError, "codec=8 is unknown"),
        ({"codec_block": 0}, InputError, "codec_block=0"),
        ({"codec_seed": -1}, InputError, "codec_seed=-1"),
        ({"codec_exempt": "batch_norm"}, InputError, "codec_exempt='batch_norm'"),
        ({"codec_exempt": ["loss"]}, InputError, "batch_norm, first_layer"),
        ({"planner": "chain"}, InputError, "needs planner='joint'; 'chain' does not"),
        ({"codec": "linear", "allow": "exact"}, InputError, "codec= is for convolution inputs that are encoded; type "),
        ({"budget": None}, InputError, "give budget="),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(how: dict[str, Any], error: Any, complaint: str) -> None:
    arguments = {"budget": "1GiB", "allow": ENCODE, **how}
    for call in (
        lambda: shoal.compile(chain(3, 4, 4), **keywords(arguments)),
        lambda: shoal.plan(chain(3, 4, 4), torch.empty(2, 3, 8, 8), **keywords(arguments)),
        lambda: torch.compile(chain(3, 4, 4), backend=backend, options=arguments)(torch.randn(2, 3, 8, 8)),
    ):
        with pytest.raises((error, RuntimeError)) as caught:
            call()
        told = getattr(caught.value, "inner_exception", caught.value)
        assert isinstance(told, error) and complaint in str(told)
