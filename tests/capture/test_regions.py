"""A step in regions computes what it computed: in fewer ops, with no more saved, and a second run gives the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal.capture.regions import Regional, in_regions
from shoal.core.simulate import simulate
from shoal.kernels.compiled_region import CompiledRegion
from shoal.planners.just_in_time import just_in_time
from tests.engine.training_laws import blocks, same_bits
from tests.joint_graphs import NETWORKS, batch, captured_step, operands, run_joint, run_lowered
from tests.uncompiled import interpreted


@pytest.fixture(autouse=True)
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)


class Tokens(nn.Module):
    """A block of a transformer, its GELU written out as in GPT-2."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * y**3)))
        return x + self.down(y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **NETWORKS,
    "tokens": lambda: nn.Sequential(nn.Linear(8, 8), Tokens(), Tokens()),
    "group norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3)),
    "dropout": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Dropout(0.4), nn.Tanh()),
    "frozen": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()),
}


def regional(name: str) -> Regional:
    torch.manual_seed(0)
    return in_regions(captured_step(MODELS[name](), batch()))


def regions_of(found: Regional) -> dict[str, str]:
    """Phase and words of each region, by name."""
    ops = found.captured.graph.op_called
    return {name: f"{ops[name].phase}: {region.words}" for name, region in found.regions.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_regions_computes_the_same_kept_or_recomputed(name: str) -> None:
    torch.manual_seed(0)
    plain = captured_step(MODELS[name](), batch())
    found = in_regions(plain)
    graph = found.captured.graph
    assert found.regions and len(graph.ops) <= len(plain.graph.ops)
    assert sum(graph.storages[s].nbytes for s in graph.saved) <= 1.05 * sum(
        plain.graph.storages[s].nbytes for s in plain.graph.saved
    )
    tensors = operands(plain.joint)
    if "dropout" not in name:  # which draws again in each run
        for ours, theirs in zip(run_joint(found.captured.joint, tensors), run_joint(plain.joint, tensors), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    def lowered(nothing_kept: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        residences = just_in_time(graph, ()) if nothing_kept else {}
        return run_lowered(found.captured, residences, [tensor.clone() for tensor in tensors])

    kept, again = lowered(False), lowered(True)
    assert all(same_bits(one, other) for one, other in zip(kept, again, strict=True) if one is not None)


@pytest.mark.parametrize("name", MODELS)
def test_a_region_writes_what_others_read_and_no_more(name: str) -> None:
    found = regional(name)
    for node in found.captured.joint.graph.nodes:
        if node.name in found.regions:
            assert len(node.users) == len(node.meta["val"])
            assert all(result.users for result in node.users), found.regions[node.name].words


def test_what_the_backward_pass_makes_again_of_a_gelu_written_out_is_not_written_forward() -> None:
    found = regional("tokens")
    graph = found.captured.joint.graph
    gelus = [node for node in graph.nodes if node.name in found.regions and "tanh" in node.target.words]
    forward = [node for node in gelus if found.captured.graph.op_called[node.name].phase == "forward"]
    assert len(forward) == 2 and len(gelus) == 4
    assert all(len(node.meta["val"]) == 1 for node in forward)  # its own result: the input is all that is saved


def test_a_normalisation_takes_in_what_follows_it_and_its_statistics_run_once() -> None:
    found = regional("residual")
    said = regions_of(found)
    assert "forward: normalised, relu" in said.values()
    assert "forward: normalised, add, relu" in said.values()
    once = {name for name in said if not found.captured.graph.op_called[name].recomputable}
    assert {said[name] for name in once if said[name].startswith("forward")} == {"forward: statistics_in_place"}
    assert sum(said[name] == "forward: statistics_in_place" for name in said) == 3


def test_running_statistics_are_moved_where_they_lie_inside_the_region() -> None:
    torch.manual_seed(0)
    found = in_regions(captured_step(nn.Sequential(*blocks(3, 8, 8)), batch()))
    joint = found.captured.joint.graph
    statistics = [node for node in joint.nodes if node.name in found.regions and "in_place" in node.target.words]
    assert len(statistics) == 2
    for node in statistics:
        _, mean, var = node.args
        assert (mean.op, var.op) == ("placeholder", "placeholder")
        assert len(node.meta["val"]) == 2  # no third and fourth result to be copied into the buffers
        assert mean in joint.output_node().all_input_nodes and var in joint.output_node().all_input_nodes
        assert not found.captured.graph.op_called[node.name].recomputable


def test_every_op_is_in_one_region_or_by_itself() -> None:
    plain = captured_step(MODELS["residual"](), batch())
    found = in_regions(plain)
    taken = [op for name, ops in found.members.items() for op in ops if "statistics" not in found.regions[name].words]
    assert len(taken) == len(set(taken))
    alone = {op.name for op in found.captured.graph.ops} - found.members.keys()
    assert alone | {op for ops in found.members.values() for op in ops} == {op.name for op in plain.graph.ops}


def test_what_is_left_out_stays_as_it_is() -> None:
    plain = captured_step(MODELS["residual"](), batch())
    found = in_regions(plain, {op.name for op in plain.graph.ops})
    assert not found.regions
    assert found.captured.graph.fingerprint == plain.graph.fingerprint
    again = in_regions(plain, {op.name for op in in_regions(plain).captured.graph.ops})
    assert again.captured.graph.fingerprint == in_regions(plain).captured.graph.fingerprint


def test_a_chain_that_its_backward_pass_reads_is_made_again_in_it() -> None:
    torch.manual_seed(0)
    plain = captured_step(nn.Sequential(nn.Linear(8, 8), Tokens()), batch())
    found = in_regions(plain)
    before, after = simulate(plain.graph, {}), simulate(found.captured.graph, {})
    saved = {found.captured.graph.storages[s].name for s in found.captured.graph.saved}
    lost = [plain.graph.storages[s] for s in plain.graph.saved if plain.graph.storages[s].name not in saved]
    wide_bytes = 4 * batch().numel() * 4  # of a tensor between the two linear layers
    assert [storage.nbytes for storage in lost].count(wide_bytes) >= 2
    assert after.peak_bytes < before.peak_bytes
    assert any(said.startswith("backward") and "tanh" in said for said in regions_of(found).values())


def test_equal_regions_are_one_object() -> None:
    found = regional("u")
    assert len({id(region) for region in found.regions.values()}) < len(found.regions)


def test_the_first_result_is_written_over_an_operand_that_dies() -> None:
    found = regional("residual")
    graph = found.captured.graph
    over = [op for op in graph.ops if op.name in found.regions and op.overwrites >= 0 and op.phase == "backward"]
    assert over and all(isinstance(found.captured.node_of[op.name].target, CompiledRegion) for op in over)
    tensors = operands(found.captured.joint)
    ours = run_lowered(found.captured, {}, tensors)
    anew = run_lowered(found.captured, {}, tensors, in_place=False)
    assert all(same_bits(one, other) for one, other in zip(ours, anew, strict=True) if one is not None)
