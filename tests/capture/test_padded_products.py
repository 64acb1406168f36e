"""Matrix products of odd sizes are computed with zeros after them: the same results, from operands a little longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from shoal.capture import aligned_rows, padded_products
from shoal.capture.aligned_rows import OPERANDS, with_aligned_rows
from shoal.capture.captured import Captured
from shoal.capture.padded_products import with_padded_products
from shoal.capture.regions import in_regions
from shoal.core.residence import Recompute
from shoal.kernels import odd_products
from shoal.kernels.odd_products import odd_product, odd_rows_product, odd_sum_product
from tests.joint_graphs import captured_step, operands, run_joint, run_lowered
from tests.uncompiled import interpreted

_aten = torch.ops.aten


@pytest.fixture(autouse=True)
def every_product_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    monkeypatch.setattr(aligned_rows, "_ON", ("cpu",))
    monkeypatch.setattr(padded_products, "_ON", ("cpu",))
    monkeypatch.setattr(aligned_rows, "_LEAST_BYTES", 0)
    monkeypatch.setattr(padded_products, "_LEAST_FLOPS", 0)
    monkeypatch.setattr(padded_products, "_FLOPS_OF_A_BYTE", 0)


class Head(nn.Module):
    """Logits in half precision, as they are; or something that ops make of them."""

    def __init__(
        self,
        words: int,
        *,
        bias: bool = False,
        then: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(words, 16)),
            nn.Parameter(torch.randn(words)) if bias else None,
        )
        self.then, self.dtype = then, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.then(F.linear(x.to(self.dtype), self.weight.to(self.dtype), bias))


class InHalf(nn.Module):
    """A head that is in half precision itself."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits) -> None:
        super().__init__()
        self.weight, self.then = nn.Parameter(torch.randn(997, 16, dtype=torch.bfloat16)), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(F.linear(x.bfloat16(), self.weight))


def classes_second(logits: torch.Tensor) -> torch.Tensor:
    """As `cross_entropy` takes them, dense: their gradient comes with the classes apart."""
    return logits.transpose(1, 2).contiguous()


def as_they_are(logits: torch.Tensor) -> torch.Tensor:
    return logits


def step_of(model: nn.Module, *shape: int) -> Captured:
    return captured_step(model, torch.randn(*(shape or (2, 8, 16)), requires_grad=True))


def padded(step: Captured, *left_out: str) -> Captured:
    return with_padded_products(with_aligned_rows(step), left_out).captured


def sizes(step: Captured) -> list[tuple[int, ...]]:
    """Of every product in the step: rows, what is summed over, columns; batched ones with the batch before them."""
    found = []
    for node in step.joint.graph.nodes:
        ours = node.target in (odd_product, odd_sum_product, odd_rows_product)
        first, second = OPERANDS.get(node.target, (0, 1) if ours else (-1, -1))
        if first >= 0:
            a, b = (node.args[place].meta["val"].shape for place in (first, second))
            found.append((*a, b[-1]))
    return found


def whole_numbers(joint: fx.GraphModule) -> list[torch.Tensor]:
    """Inputs whose products are exact in bfloat16's accumulators, so that their bits do not depend on an order."""
    return [tensor.sign() * (tensor.abs() * 2).ceil().clamp(max=4) for tensor in operands(joint)]


def assert_same_results(step: Captured, plain: Captured, tensors: list[torch.Tensor]) -> None:
    for ours, theirs in zip(run_joint(step.joint, tensors), run_joint(plain.joint, tensors), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("then", [as_they_are, classes_second, torch.relu], ids=["given", "copied", "read"])
@pytest.mark.parametrize("bias", [False, True], ids=["mm", "addmm"])
def test_no_product_has_an_odd_size_and_results_are_the_same(then: Any, bias: bool) -> None:
    plain = step_of(Head(997, bias=bias, then=then))
    assert sorted(sizes(plain)) == [(16, 16, 997), (16, 997, 16), (997, 16, 16)]
    step = padded(plain)
    assert sorted(sizes(step)) == [(16, 16, 1000), (16, 1000, 16), (1000, 16, 16)]
    tensors = whole_numbers(plain.joint)
    assert_same_results(step, plain, tensors)
    assert_same_results(in_regions(step).captured, plain, tensors)


@pytest.mark.parametrize("residence", ["kept", "recomputed"])
def test_a_planned_step_computes_the_same(residence: str) -> None:
    plain = step_of(Head(997))
    step = in_regions(padded(plain)).captured
    tensors = whole_numbers(plain.joint)
    graph = step.graph
    saved = [graph.storages[place] for place in graph.saved if graph.storages[place].nbytes == 1000 * 16 * 2]
    assert len(saved) == 1  # the longer weight
    residences = {saved[0].name: Recompute(("mm_2_padded",))} if residence == "recomputed" else {}
    for ours, theirs in zip(run_lowered(step, residences, tensors), run_joint(plain.joint, tensors), strict=True):
        assert ours is theirs or torch.equal(ours, theirs)


def test_the_longer_weight_is_written_once_for_both_passes_by_the_region_that_casts_it() -> None:
    found = in_regions(padded(step_of(Head(997), 2, 4, 16)))
    words = [region.words for region in found.regions.values()]
    assert words == ["_to_copy, constant_pad_nd", "constant_pad_nd"]  # the weight, the gradient of the logits
    short, longer = (rows * 16 * 2 for rows in (997, 1000))
    assert [s.nbytes for s in found.captured.graph.storages if s.nbytes in (short, longer)] == [longer, longer]
    # of the weight, and of its gradient


def test_what_a_region_reads_is_not_copied_and_what_is_handed_out_is_dense() -> None:
    for read in (classes_second, torch.relu):
        nodes = padded(step_of(Head(997, then=read))).joint.graph.nodes
        assert not [node for node in nodes if node.target is odd_product]
    (product,) = [node for node in padded(step_of(Head(997))).joint.graph.nodes if node.target is odd_product]
    assert product.meta["val"].stride() == (997, 1)


def test_odd_sums_of_batched_products_are_padded() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.softmax(q @ k.transpose(1, 2), -1) @ v

    q, k, v = (torch.randn(2, 197, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    plain = captured_step(Attention(), q, k, v)
    step = padded(plain)
    weighted = (2, 197, 197, 16)  # the result, and the gradients of `q` and `v`
    assert sizes(plain).count(weighted) == 3
    assert sizes(step).count((2, 197, 200, 16)) == 2 and sizes(step).count(weighted) == 1  # summed along other axes
    tensors = operands(plain.joint)
    expected = run_joint(plain.joint, tensors)
    for found in (step, in_regions(step).captured):
        for ours, theirs in zip(run_joint(found.joint, tensors), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()


def test_errors_from_float64_are_those_of_the_plain_product() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 96), torch.randn(96, 997)
    halves, exact = (a.bfloat16(), b.bfloat16()), a.bfloat16().double() @ b.bfloat16().double()
    longer = F.pad(halves[1], [0, 3])
    ours = (odd_product(halves[0], longer, 997).double() - exact).square().mean()
    theirs = ((halves[0] @ halves[1]).double() - exact).square().mean()
    assert ours <= 1.01 * theirs


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_pieces_of_the_rows_make_the_whole(rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd_products, "_PIECE_BYTES", 4 * 8 * 4)  # four rows
    a, b, bias = torch.randn(rows, 5), torch.randn(5, 8), torch.randn(8) if with_bias else None
    found = odd_product(a, b, 7, bias)
    assert found.is_contiguous() and found.untyped_storage().nbytes() == rows * 7 * 4
    torch.testing.assert_close(found, (a @ b + (0 if bias is None else bias))[:, :7])


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Head(1000), "no size is odd"),
        (Head(997, dtype=torch.float32), "no tensor cores"),
        (Head(49), "seven more of 49 are much"),
    ],
)
def test_other_steps_stay_as_they_are(model: nn.Module, why: str) -> None:
    step = step_of(model)
    assert with_padded_products(step).captured is step, why


def test_small_products_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(Head(997))
    flops = 2 * 16 * 16 * 997
    monkeypatch.setattr(padded_products, "_LEAST_FLOPS", flops)
    assert with_padded_products(step).products
    monkeypatch.setattr(padded_products, "_LEAST_FLOPS", flops + 1)
    assert with_padded_products(step).captured is step


def test_copies_are_made_where_they_are_little_beside_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 x 997 logits and as many gradients each is copied, read and written, and the longer weight written besides:
    2 * 16 * 16 * 997 operations for 96 * 997 bytes.
    """
    plain = with_aligned_rows(step_of(Head(997)))
    monkeypatch.setattr(padded_products, "_FLOPS_OF_A_BYTE", 2 * 16 * 16 / 96)
    assert len(with_padded_products(plain).products) == 3
    monkeypatch.setattr(padded_products, "_FLOPS_OF_A_BYTE", 2 * 16 * 16 / 95.9)
    assert list(with_padded_products(plain).products) == ["mm_1_padded"]  # whose copy of the gradient is all
    monkeypatch.setattr(padded_products, "_FLOPS_OF_A_BYTE", 2 * 16 * 16 / 63.9)
    assert with_padded_products(plain).captured is plain


@pytest.mark.parametrize("in_half", [False, True], ids=["cast", "handed out"])
def test_large_tensors_that_nothing_writes_are_copied_in_pieces(in_half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of logits in odd rows is an input of the step, and two products read it."""
    plain = step_of(InHalf() if in_half else Head(997), 4, 8, 16)
    monkeypatch.setattr("shoal.capture.aligned_rows._MOST_COPIED_BYTES", 32 * 997 * 2 - 1)
    monkeypatch.setattr(odd_products, "_PIECE_BYTES", 16 * 997)
    step = padded(plain)
    targets = [node.target for node in step.joint.graph.nodes]
    assert [targets.count(one) for one in (odd_product, odd_sum_product, odd_rows_product)] == [1, 1, 1]
    assert [s.nbytes for s in step.graph.storages].count(16 * 1000 * 2) == 1  # the weight's only
    assert_same_results(step, plain, whole_numbers(plain.joint))


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_sums_over_pieces_of_odd_rows_make_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd_products, "_PIECE_BYTES", 4 * 8 * 4)  # four rows
    a, b = torch.randn(rows, 5), F.pad(torch.randn(5, 6), [0, 0, 0, 3])
    torch.testing.assert_close(odd_sum_product(a, b), a @ b[:5])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 53])
def test_pieces_of_a_transposed_operand_make_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd_products, "_PIECE_BYTES", 0)  # sixteen rows
    a, b = torch.randn(5, rows, dtype=torch.bfloat16).t(), torch.randn(5, 6, dtype=torch.bfloat16)
    found = odd_rows_product(a, b)
    assert found.is_contiguous() and found.untyped_storage().nbytes() == rows * 6 * 2
    torch.testing.assert_close(found, a @ b)


def test_products_that_are_left_out_stay_plain() -> None:
    aligned = with_aligned_rows(step_of(Head(997, then=classes_second)))
    products = with_padded_products(aligned).products
    assert sorted(products) == ["mm_1_padded", "mm_2_padded", "mm_padded"]
    for name, (plain, instead) in products.items():
        assert name == f"{plain.name}_padded" == instead[0].name
        found = with_padded_products(aligned, {plain.name})
        assert sorted(found.products) == sorted(products.keys() - {name})


def test_gradients_that_the_caller_gets_are_no_parts_of_longer_tensors() -> None:
    plain = step_of(InHalf(then=classes_second))
    step = padded(plain)
    assert (997, 16, 16) in sizes(step) and (16, 1000, 16) in sizes(step)
    results = run_joint(step.joint, whole_numbers(plain.joint))
    assert all(one is None or one.untyped_storage().nbytes() == one.nbytes for one in results)
    assert_same_results(step, plain, whole_numbers(plain.joint))
