"""Matrix products read rows that begin at multiples of 16 bytes: the same numbers, of tensors a little longer."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from shoal.capture import aligned_rows
from shoal.capture.aligned_rows import with_aligned_rows
from shoal.capture.captured import Captured
from shoal.capture.regions import in_regions
from tests.joint_graphs import captured_step, operands, run_joint
from tests.uncompiled import interpreted

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    monkeypatch.setattr(aligned_rows, "_ON", ("cpu",))
    monkeypatch.setattr(aligned_rows, "_LEAST_BYTES", 0)


class Head(nn.Module):
    """Logits over a vocabulary in half precision, as language models hand them to a loss."""

    def __init__(self, words: int, classes_last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.classes_last, self.dtype = nn.Parameter(torch.randn(words, 16)), classes_last, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x.to(self.dtype), self.weight.to(self.dtype))
        return (logits if self.classes_last else logits.transpose(1, 2).contiguous()).float().tanh()


def step_of(words: int, classes_last: bool = True, dtype: torch.dtype = torch.bfloat16) -> Captured:
    torch.manual_seed(0)
    return captured_step(Head(words, classes_last, dtype), torch.randn(2, 8, 16, requires_grad=True))


def row_strides(step: Captured, columns: int) -> list[int]:
    """Of what products read, rows of that many columns, forward and backward."""
    found = []
    for node in step.joint.graph.nodes:
        for operand in node.all_input_nodes if node.target in PRODUCTS else ():
            value = operand.meta["val"]
            found += [
                max(value.stride())
                for size, stride in zip(value.shape, value.stride(), strict=True)
                if size == columns and stride == 1
            ]
    return found


@pytest.mark.parametrize("classes_last", [True, False], ids=["written by ops", "copied"])
def test_products_of_odd_rows_read_aligned_ones_and_compute_the_same(classes_last: bool) -> None:
    plain = step_of(997, classes_last)
    aligned = with_aligned_rows(plain)
    assert row_strides(plain, 997) == [997, 997]  # of the gradients of input and weight
    assert row_strides(aligned, 997) == [1000, 1000]
    tensors = operands(plain.joint)
    expected = run_joint(plain.joint, tensors)
    for step in (aligned, in_regions(aligned).captured):
        for ours, theirs in zip(run_joint(step.joint, tensors), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours is None or ours.stride() == theirs.stride()


@pytest.mark.parametrize("classes_last", [True, False], ids=["written by ops", "copied"])
def test_the_longer_rows_are_written_once_in_place_of_the_odd_ones(classes_last: bool) -> None:
    plain = step_of(997, classes_last)
    found = in_regions(with_aligned_rows(plain))
    gradients = [s.nbytes for s in found.captured.graph.storages if 997 * 16 * 2 <= s.nbytes <= 1000 * 16 * 2]
    assert gradients.count(1000 * 16 * 2) == 1
    longer = [region for region in found.regions.values() if "constant_pad_nd" in region.words]
    assert len(longer) == 1
    (node,) = (node for node in found.captured.joint.graph.nodes if node.target is longer[0])
    assert [tuple(value.shape) for value in node.meta["val"]] == [(2, 8, 1000)]


@pytest.mark.parametrize(
    ("words", "dtype", "why"),
    [
        (1000, torch.bfloat16, "rows are aligned"),
        (997, torch.float32, "no tensor cores"),
        (49, torch.bfloat16, "seven more of 49 are much"),
    ],
)
def test_other_steps_stay_as_they_are(words: int, dtype: torch.dtype, why: str) -> None:
    step = step_of(words, dtype=dtype)
    assert with_aligned_rows(step) is step, why


def test_what_the_caller_gets_stays_dense() -> None:
    class Given(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = x.to(torch.bfloat16).tanh()
            return rows, rows @ rows.transpose(0, 1)

    step = captured_step(Given(), torch.randn(8, 997, requires_grad=True))
    aligned = with_aligned_rows(step)
    given: list[fx.Node] = [node for node in aligned.forward_outputs if isinstance(node, fx.Node)]
    assert [node.meta["val"].stride() for node in given[:2]] == [(997, 1), (8, 1)]
