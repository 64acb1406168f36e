"""Which convolutions of a captured step are computed in pieces, and the step in which they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.capture import pieces
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encoded, offers
from shoal.capture.pieces import choose_elsewhere, choose_pieces, in_pieces
from shoal.core import presets
from shoal.core.lossy import LossyOptions
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.variant import Pieces
from shoal.cost.profile import profile_step
from shoal.cost.roofline import roofline
from shoal.errors import PlanError
from tests.raising import raising

CPU = torch.device("cpu")
TARGETS = {"shoal.convolution_pieces.forward", "shoal.convolution_pieces.input_gradient"} | {
    "shoal.convolution_pieces.weight_gradient"
}


@pytest.fixture(scope="module")
def profiled() -> tuple[Captured, StepGraph]:
    """On a batch of one; PyTorch unfolds the input of the second convolution, and the third is small."""
    torch.manual_seed(0)
    layers = [nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(4)]
    model = nn.Sequential(*layers, nn.Conv3d(4, 4, 3, padding=1), nn.Flatten())
    captured, _ = capture_step(model, torch.randn(1, 2, 24, 24, 24), name="small")
    return captured, profile_step(captured, CPU)


def test_those_are_chosen_whose_scratch_may_make_the_peak(profiled: tuple[Captured, StepGraph]) -> None:
    captured, graph = profiled
    chosen = choose_pieces(captured, graph, {"pieces"}, lambda step: profile_step(step, CPU))
    assert [graph.op_called[cut.op].layer for cut in chosen] == ["2", "2", "2"]  # with both gradients
    assert all(graph.op_called[cut.op].workspace_bytes >= 4 << 20 for cut in chosen)


def test_the_step_computes_the_same_with_less_scratch(profiled: tuple[Captured, StepGraph]) -> None:
    captured, graph = profiled
    chosen = choose_pieces(captured, graph, {"pieces"}, lambda step: profile_step(step, CPU))
    cut = in_pieces(captured, chosen)
    after = profile_step(cut, CPU)
    assert {op.target for op in after.ops} & TARGETS == TARGETS
    assert not TARGETS & {op.target for op in captured.graph.ops}  # it stays as it was
    names = {one.op for one in chosen}
    for before, now in zip(graph.ops, after.ops, strict=True):
        assert (before.name, before.reads, before.writes, before.flops) == (now.name, now.reads, now.writes, now.flops)
        if before.name in names:
            assert now.workspace_bytes < before.workspace_bytes / 2
        else:
            assert (before.target, before.workspace_bytes) == (now.target, now.workspace_bytes)
    assert simulate(after, {}).peak_bytes < 0.6 * simulate(graph, {}).peak_bytes
    assert in_pieces(captured, ()) is captured


def test_what_needs_less_than_an_op_that_stays_whole_is_not_tried(
    profiled: tuple[Captured, StepGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, graph = profiled
    monkeypatch.setattr(pieces.convolution_pieces, "choose", lambda *_: pytest.fail("tried"))
    pooling = next(op for op in graph.ops if op.target == "shoal.pooling.forward")
    larger = tuple(replace(op, workspace_bytes=1 << 30) if op is pooling else op for op in graph.ops)
    assert choose_pieces(captured, replace(graph, ops=larger), {"pieces"}, lambda _: graph) == ()


def test_a_plan_of_another_step_is_refused_by_the_op_it_cuts(profiled: tuple[Captured, StepGraph]) -> None:
    captured, _ = profiled
    for op in ("nothing", "relu"):
        with raising(PlanError, f"'{op}'"):
            in_pieces(captured, [Pieces(op, 0, 2)])


def test_on_a_gpu_that_is_not_here_gradients_of_large_norms_lie_over_the_incoming_ones() -> None:
    with torch.device("meta"):
        norms = [nn.GroupNorm(4, 16), nn.InstanceNorm3d(16, affine=True), nn.BatchNorm3d(16)]
        layers = [layer for norm in norms for layer in (nn.Conv3d(16, 16, 1), norm, nn.Sigmoid())]
        model, x = nn.Sequential(nn.Conv3d(1, 16, 1), *layers), torch.empty(1, 1, 48, 48, 48)
    captured, _ = capture_step(model, x, name="norms", runs_here=False)
    gpu = presets.get("rtx-4090-24gb")
    whole = roofline(captured.graph, gpu)
    chosen = choose_elsewhere(captured, whole, {"pieces"}, lambda step: roofline(step.graph, gpu))
    assert sorted(whole.op_called[one.op].layer for one in chosen) == ["2", "5", "8"]
    cut = roofline(in_pieces(captured, chosen).graph, gpu)
    map_bytes = 16 * 48**3 * 4
    for one in chosen:
        before, after = whole.op_called[one.op], cut.op_called[one.op]
        assert (before.overwrites, after.overwrites) == (-1, after.reads[0])
        assert (before.workspace_bytes, after.workspace_bytes) == (0, map_bytes // 8)
        assert after.seconds > before.seconds  # one sweep more
    assert choose_elsewhere(captured, whole, {"direct"}, lambda step: whole) == ()


def test_what_could_be_encoded_of_the_whole_step_can_be_in_pieces(profiled: tuple[Captured, StepGraph]) -> None:
    captured, graph = profiled
    lossy = LossyOptions("dynamic_tree")
    cut = in_pieces(captured, choose_pieces(captured, graph, {"pieces"}, lambda step: profile_step(step, CPU)))
    offered = offers(cut, lossy)
    assert offered and offered == offers(captured, lossy)
    step = encoded(cut, [offered[0].storage], lossy).graph
    decoding = step.op_called[next(op.name for op in step.ops if op.target.endswith(".decode"))]
    readers = [step.ops[op].target for storage in decoding.writes for op in step.readers[storage]]
    assert readers == ["shoal.convolution_pieces.weight_gradient"]


def prelus() -> tuple[nn.Module, torch.Tensor]:
    """On the CPU: the meta device loses gradients after PReLU."""
    layers = [layer for slopes in (1, 16) for layer in (nn.Conv3d(16, 16, 1), nn.PReLU(slopes))]
    return nn.Sequential(nn.Conv3d(1, 16, 1), *layers, nn.Conv3d(16, 1, 1)), torch.zeros(1, 1, 48, 48, 48)


def test_on_a_gpu_that_is_not_here_gradients_of_large_prelus_lie_over_the_incoming_ones() -> None:
    captured, _ = capture_step(*prelus(), name="prelus", runs_here=False)
    gpu = presets.get("rtx-4090-24gb")
    whole = roofline(captured.graph, gpu)
    chosen = choose_elsewhere(captured, whole, {"pieces", "direct"}, lambda step: roofline(step.graph, gpu))
    assert [(whole.op_called[one.op].layer, one.dim, one.count, one.reordered) for one in chosen] == [
        ("4", 1, 8, True),
        ("2", 0, 8, True),
    ]
    changed = in_pieces(captured, chosen)
    cut = roofline(changed.graph, gpu)
    map_bytes = 16 * 48**3 * 4
    for one in chosen:
        before, after = whole.op_called[one.op], cut.op_called[one.op]
        assert [whole.storages[made].nbytes for made in before.writes] == [map_bytes, map_bytes]
        assert cut.storages[after.writes[0]].nbytes == map_bytes > 1000 * cut.storages[after.writes[1]].nbytes
        assert after.overwrites == after.reads[0] and after.workspace_bytes == map_bytes // 4
    assert len(cut.ops) == len(whole.ops) - 2  # the sums
    assert choose_elsewhere(captured, whole, {"pieces"}, lambda step: whole) == ()  # they have PyTorch's bits


class Joined(nn.Module):
    """Joins what two PReLUs make, as a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 16, 1), nn.Conv3d(16, 16, 1)
        self.last = nn.ConvTranspose3d(32, 1, 1)
        self.slopes = nn.ModuleList([nn.PReLU(), nn.PReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.slopes[0](self.first(x))
        return self.last(torch.cat([y, self.slopes[1](self.second(y))], 1))


def test_the_gradient_of_a_part_of_a_concatenation_is_cut_too_and_makes_a_result_of_its_own() -> None:
    captured, _ = capture_step(Joined(), torch.zeros(2, 1, 32, 48, 48), name="joined", runs_here=False)
    gpu = presets.get("rtx-4090-24gb")
    whole = roofline(captured.graph, gpu)
    chosen = choose_elsewhere(captured, whole, {"pieces", "direct"}, lambda step: roofline(step.graph, gpu))
    of_part = next(one for one in chosen if whole.op_called[one.op].layer == "slopes.1")
    cut = roofline(in_pieces(captured, chosen).graph, gpu)
    before, after = whole.op_called[of_part.op], cut.op_called[of_part.op]
    map_bytes = 2 * 16 * 32 * 48 * 48 * 4
    assert sum(whole.storages[made].nbytes for made in before.writes) == 2 * map_bytes
    made_bytes = sum(cut.storages[made].nbytes for made in after.writes)
    assert made_bytes + after.workspace_bytes <= 1.25 * map_bytes + 8 and after.overwrites == -1


def test_those_of_the_cpu_lose_their_summands() -> None:
    captured, _ = capture_step(*prelus(), name="prelus")
    whole = profile_step(captured, CPU)
    chosen = choose_pieces(captured, whole, {"pieces", "direct"}, lambda step: profile_step(step, CPU))
    cut = profile_step(in_pieces(captured, chosen), CPU)
    reordered = [one for one in chosen if one.reordered]
    assert len(reordered) == 2
    for one in reordered:
        before, after = whole.op_called[one.op], cut.op_called[one.op]
        assert after.target == "shoal.prelu.in_pieces" and (before.reads, before.writes) == (
            after.reads,
            after.writes,
        )
        assert after.workspace_bytes < 0.4 * before.workspace_bytes
