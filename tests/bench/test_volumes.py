"""The benchmark of networks for volumes: its step, its peers, its search, and that it runs from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench import volumes, volumes_catalogue
from bench.frame import Unavailable
from bench.pages import shown
from bench.volumes_catalogue import Entry, Size
from bench.volumes_planned import added_rows, largest_patch, largest_side, least_share
from bench.volumes_step import BFLOAT16, FLOAT32, VolumeStep, checkpointed, make_step, scales
from shoal.core import presets


class Block(nn.Sequential):
    """What is checkpointed."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.Conv3d(channels, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU())


class SmallNet(nn.Module):
    """Two scales of deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(1), Block(8), Block(8)
        self.heads = nn.ModuleList(nn.Conv3d(8, 2, 1) for _ in range(2))

    def forward(self, volumes: torch.Tensor) -> list[torch.Tensor]:
        whole = self.second(self.first(volumes))
        half = self.third(F.avg_pool3d(whole, 2))
        return [self.heads[0](whole), self.heads[1](half)]


SIZE = Size(SmallNet, 16)
ENTRY = Entry("here", SIZE, Size(SmallNet, 64), ("Block",), 64)


def test_the_loss_is_that_of_each_scale_half_as_much_at_each_lower_one() -> None:
    target = torch.randint(2, (1, 4, 4, 4))
    step = VolumeStep("x", nn.Identity(), torch.zeros(1), target)
    whole, half = torch.randn(1, 2, 4, 4, 4), torch.randn(1, 2, 2, 2, 2)
    expected = (2 * F.cross_entropy(whole, target) + F.cross_entropy(half, target[:, ::2, ::2, ::2])) / 3
    assert torch.allclose(step.loss([whole, half]), expected)
    assert torch.allclose(step.loss(whole), F.cross_entropy(whole, target))


def test_stacked_scales_are_taken_apart() -> None:
    stacked = torch.randn(1, 3, 2, 4, 4, 4)
    assert all(torch.equal(one, stacked[:, place]) for place, one in enumerate(scales(stacked)))


def test_checkpointing_by_block_gives_the_same_bits_in_fewer_bytes() -> None:
    step = make_step("small", SIZE, FLOAT32, 0)
    step.reset()
    step.step(step.model)
    expected, plain_bytes = step.gradients(), step.peak_bytes(step.shared_copy())
    found = dict(checkpointed(ENTRY, step))
    assert list(found) == ["every block", "the first half of the blocks"]
    for forward in found.values():
        step.reset()
        step.step(forward)
        assert all(torch.equal(value, expected[name]) for name, value in step.gradients().items())
    assert step.peak_bytes(found["every block"]) < plain_bytes


def test_under_autocast_outputs_leave_in_float32_and_were_computed_in_bfloat16() -> None:
    step = make_step("small", SIZE, BFLOAT16, 0)
    whole, half = step.outputs(step.model)
    assert whole.dtype == half.dtype == torch.float32
    assert torch.equal(whole, whole.bfloat16().float())


@pytest.mark.parametrize("budget", [500_000, 1_000_000, 27_000_000])
@pytest.mark.parametrize(("step", "fixed", "first"), [(16, 0, 16), (32, 90_000, 64), (8, 300_000, 256)])
def test_the_largest_side_is_the_one_that_trying_all_finds(budget: int, step: int, fixed: int, first: int) -> None:
    def least(side: int) -> int:
        return min(budget, fixed + 3 * side**3) if fixed + 3 * side**3 < 1.2 * budget else fixed + 3 * side**3

    fits = [side for side in range(step, 1000, step) if least(side) <= budget]
    assert largest_side(least, budget, step, first) == (max(fits), max(fits) + step)


def test_what_budgets_add_is_beside_plain_pytorchs_step_and_the_least_share_is_below_them() -> None:
    how = (ENTRY, FLOAT32)
    found = added_rows(*how, (70, 1), "rtx-3060-12gb", "recompute", 0)
    inside, hopeless = found["rows"]
    assert inside["fits"] and inside["predicted_peak_bytes"] <= inside["budget_bytes"]
    assert inside["predicted_added_percent"] >= inside["lower_bound_percent"] and inside["variant"] == "unmodified"
    least = least_share(*how, "rtx-3060-12gb", "recompute", 0)
    assert not hopeless["fits"] and hopeless["least_feasible_bytes"] == least["least_bytes"]
    assert least["least_bytes"] < 0.7 * found["plain_peak_bytes"] and found["plain_seconds"] > 0
    table = volumes.added_table("Small", FLOAT32, found)
    assert "time added to plain PyTorch's" in str(table.title) and table.row_count == 2


def test_the_largest_patch_of_shoal_is_a_cube_and_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    card = presets.get("rtx-3060-12gb")
    card = replace(card, device=replace(card.device, memory_bytes=400 << 20))
    monkeypatch.setattr(presets, "get", lambda name: card)
    found = largest_patch(ENTRY, "rtx-3060-12gb", "recompute", 0, 40.0)
    plain, ours = found["plain"], found["shoal"]
    assert plain["predicted_peak_bytes"] <= found["budget_bytes"] >= ours["predicted_peak_bytes"]
    assert ours["plain_peak_bytes"] > found["budget_bytes"]  # it does not fit by itself
    assert len(set(ours["patch"])) == 1 and found["volumes"] > 1


def test_a_quick_run_writes_what_its_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> nn.Module:
        raise Unavailable("monai does not import here")

    catalogue = {"Small": ENTRY, "Absent": Entry("monai", Size(absent, 8), Size(absent, 8), ())}
    monkeypatch.setattr(volumes, "CATALOGUE", catalogue)
    assert volumes.main(["--quick", "--no-compiled-peer", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 budgets met, 0 exceeded" in said.replace("\n", " ") and "Absent: skipped, monai" in said
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())
    (row,) = result["measured"][FLOAT32]["rows"]
    assert row["shoal"]["measured_peak_bytes"] <= row["budget_bytes"]
    assert row["shoal"]["exactness"] in ("equal bits", "same function")
    again = ["--networks", "Small", "--precisions", FLOAT32, "--resume", "--allow", "recompute", "--parts"]
    assert volumes.main([*again, "added", "--shares", "70", "--out", str(tmp_path)]) == 0
    result = json.loads(path.read_text())
    assert result["measured"][FLOAT32]["rows"] == [row] and len(result["added"][FLOAT32]["rows"]) == 1
    assert volumes.main([*again, "planned", "--out", str(tmp_path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["added"][FLOAT32]["rows"]) == 1 and result["planned"][FLOAT32]["least_percent"] > 0
    block, image = shown(path, result, {})
    assert "Small, float32, 1 x 16^3" in block and "planned for a GPU" in block and image is not None
    assert "not measured |" in block and "before" not in block
    old = path.rename(path.with_name(path.name[:-15] + "2026-01-02.json"))
    result["conditions"] |= {"date": "2026-01-02T00:00:00", "code": {"engine": "another"}}
    result["measured"][FLOAT32].pop("conditions")  # as in files of before parts had them
    old.write_text(json.dumps(result))
    assert volumes.main([*again, "planned", "--out", str(tmp_path)]) == 0
    (result,) = [json.loads(one.read_text()) for one in tmp_path.iterdir() if one != old]
    first, second, third = [table.title for table in volumes.tables(result)]
    assert "1 x 16^3" in str(first) and "(2026-01-02, before" in str(first) and "engine" in str(first)
    assert "2026" not in str(second) and "2026" not in str(third)


def test_slabs_are_measured_by_the_means_that_lead_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "CATALOGUE", {"Small": replace(ENTRY, slabbed=SIZE), "None": ENTRY})
    monkeypatch.setattr("shoal.engine.search.split_variants._DEPTHS", (0.5,))
    monkeypatch.setattr("shoal.engine.search.split_variants._PARTS", (2,))
    arguments = ["--quick", "--no-compiled-peer", "--parts", "slabs", "--shares", "80", "--out", str(tmp_path)]
    assert volumes.main(arguments) == 0
    result = json.loads(next(path for path in tmp_path.iterdir() if "Small" in path.name).read_text())
    (table,) = volumes.tables(result)
    assert volumes.SLABS in str(table.title) and volumes.summary([result])["budgets"] == 1


def test_the_same_network_is_planned_in_two_dimensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flat(SmallNet):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.first, self.second = (nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.ReLU()) for n in (1, 8))
            self.heads = nn.ModuleList([nn.Conv2d(8, 2, 1)])

        def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
            return [self.heads[0](self.second(self.first(images)))]

    monkeypatch.setattr(volumes, "CATALOGUE", {"Small": replace(ENTRY, flat=Size(Flat, 64, 4, 2)), "None": ENTRY})
    assert volumes.main(["--parts", "flat", "--allow", "recompute", "--out", str(tmp_path)]) == 0
    result = json.loads(next(path for path in tmp_path.iterdir() if "Small" in path.name).read_text())
    (table,) = volumes.tables(result)
    assert "in two dimensions" in str(table.title) and result["flat"]["batch"] == 4


def test_nothing_to_measure_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes_catalogue, "_library", _missing)
    assert volumes.main(["--networks", "UNet,VNet"]) == 3
    assert "monai.networks.nets does not import here" in capsys.readouterr().err


def _missing(name: str) -> nn.Module:
    raise Unavailable(f"{name} does not import here: No module named 'monai'")
