"""Weights and gradients that travel in other ways: the same training where nothing is rounded, and it resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal.app.models
from shoal.app.training import loop
from shoal.app.training.options import Outcome, TrainOptions
from shoal.app.training.results import bytes_by_kind
from shoal.errors import InputError
from tests.app.training.test_ranks import Watched, facts, these_ranks
from tests.app.training.tiny import put_in_place
from tests.ranks import run_on_ranks

Options = Callable[..., TrainOptions]


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return torch.load(outcome.checkpoint, weights_only=True)["model"]


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = (torch.load(folder / "checkpoint.pt", weights_only=True)["model"] for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_weights_on_the_host_in_32_bits_train_as_plain_pytorch_does(tiny: Options, tmp_path: Path) -> None:
    plain = loop.train(tiny(out=tmp_path / "plain"), Watched())
    hosted = loop.train(tiny(weights="host", out=tmp_path / "host"), Watched())
    assert (hosted.losses, hosted.accuracies) == (plain.losses, plain.accuracies)
    assert_same_weights(tmp_path / "plain", tmp_path / "host")
    assert hosted.traffic is not None and hosted.traffic["steps"] == 6
    total = hosted.traffic["total"]
    assert total["weights"]["sent_bytes"] == total["weights"]["raw_bytes"] > 0
    assert plain.traffic is None


ADAPTED = {"weights": "host", "precision": "adaptive", "awp_threshold": -1e-9, "awp_interval": 1, "one_byte": "linear"}


@pytest.mark.parametrize("change", [ADAPTED, {"weights": "host", "precision": "bf16", "compress_gradients": "linear"}])
def test_narrow_weights_from_the_host_resume_bit_for_bit(tiny: Options, tmp_path: Path, change: dict[str, Any]) -> None:
    whole = loop.train(tiny(**change, out=tmp_path / "whole"), Watched())
    part = tiny(**change, out=tmp_path / "part")
    loop.train(part, Watched(2))
    resumed = loop.train(replace(part, resume=True), Watched())
    assert resumed.losses == whole.losses
    assert_same_weights(tmp_path / "whole", tmp_path / "part")
    assert whole.traffic is not None
    sent = whole.traffic["total"]["weights"]
    assert sent["sent_bytes"] < 0.9 * sent["raw_bytes"]
    assert "weights sent" in bytes_by_kind(whole.traffic)


HYBRID = "examples.parallel.strategy:HybridParallel"
HEADERS = 3.0  # on messages as small as these


def chain(num_classes: int = 10) -> nn.Module:
    """A convolution and two linear layers, in a row."""
    convolution = [nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*convolution, nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, num_classes))


EXCHANGED: list[tuple[dict[str, Any], str, float]] = [
    ({"compress_gradients": "one_bit"}, "gradients", 0.4),
    ({"parallel": HYBRID}, "activations", HEADERS),
    ({"parallel": HYBRID, "compress_gradients": "dynamic_tree"}, "activations", HEADERS),
    ({"weights": "sharded"}, "weights", 1.0),
    ({"weights": "sharded", "precision": "16"}, "weights", 0.6),
    ({"weights": "sharded", "compress_gradients": "one_bit"}, "gradients", 0.4),
]


def train_plain_and_changed(out: Path) -> list[list[dict[str, Any]]]:
    """Of each change: data parallel in float32; then changed: whole, interrupted, and resumed."""
    ranks, found = these_ranks(), []
    plain: dict[bool, Outcome] = {}
    for number, (change, _, _) in enumerate(EXCHANGED):
        with pytest.MonkeyPatch.context() as patch:
            tiny, in_a_row = put_in_place(patch, out), "parallel" in change
            if in_a_row:
                patch.setattr(shoal.app.models, "find", lambda name: chain)
            if in_a_row not in plain:
                plain[in_a_row] = loop.train(tiny(out=out / f"plain {in_a_row}"), Watched(), ranks)
            whole = loop.train(tiny(**change, out=out / f"whole {number}"), Watched(), ranks)
            part = tiny(**change, out=out / f"part {number}")
            stopped = loop.train(part, Watched(2 if ranks.rank == 1 else -1), ranks)
            resumed = loop.train(replace(part, resume=True), Watched(), ranks)
            found.append([facts(outcome) for outcome in (plain[in_a_row], whole, stopped, resumed)])
    return found


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[list[dict[str, Any]]]]]:
    out = tmp_path_factory.mktemp("exchanged")
    return out, run_on_ranks(train_plain_and_changed, 2, out)


@pytest.mark.parametrize("number", range(len(EXCHANGED)), ids=[str(change) for change, _, _ in EXCHANGED])
def test_ranks_that_exchange_something_else_train_and_resume(
    exchanged: tuple[Path, list[list[list[dict[str, Any]]]]], number: int
) -> None:
    """Where nothing is rounded as data parallel, but for the order of sums."""
    (out, found), (change, kind, most) = exchanged, EXCHANGED[number]
    for plain, whole, stopped, resumed in (of_rank[number] for of_rank in found):
        assert whole["losses"] == pytest.approx(
            plain["losses"], rel=0.2 if change.keys() & {"precision", "compress_gradients"} else 1e-5
        )
        assert stopped["losses"] == whole["losses"][: len(stopped["losses"])]
        assert resumed["losses"] == whole["losses"]
        assert resumed["accuracies"] == whole["accuracies"]
        sent = whole["traffic"]["total"][kind]
        assert 0 < sent["sent_bytes"] <= most * sent["raw_bytes"]
        gradients = plain["traffic"]["total"]["gradients"]
        assert gradients["sent_bytes"] == gradients["raw_bytes"]
    assert_same_weights(out / f"whole {number}", out / f"part {number}")
    with_plain = (f"whole {number}", f"plain {'parallel' in change}")
    names, others = (torch.load(out / name / "checkpoint.pt", weights_only=True)["model"].keys() for name in with_plain)
    assert names == others


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": "cloud"}, "unknown weights 'cloud': give one of host, sharded"),
        ({"precision": "12", "weights": "host"}, "unknown precision '12'"),
        ({"precision": "16"}, "precision '16' is for weights that are sent; give --weights"),
        ({"weights": "host", "parallel": HYBRID}, "exclude one another"),
        ({"weights": "host", "planner": "joint", "budget_bytes": 2**30}, "give --weights host with --planner none"),
        ({"weights": "host", "amp": "fp16"}, "--amp bf16 is possible"),
        ({"weights": "host", "awp_interval": 3}, "needs --adaptive-precision"),
        ({"weights": "host", "precision": "16", "one_byte": "linear"}, "--one-byte linear is for weights in 8 bits"),
        ({"weights": "host", "compress_gradients": "auto"}, "name a codec"),
        ({"weights": "host", "ranks": 2}, "torchrun started 2; give --weights sharded"),
        ({"weights": "sharded"}, "--weights sharded is between ranks: start them with torchrun"),
        ({"parallel": HYBRID}, f"--parallel {HYBRID} is between ranks"),
        ({"compress_gradients": "auto"}, "--compress-gradients is between ranks"),
    ],
)
def test_what_cannot_be_combined_is_reported(tiny: Options, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        loop.train(tiny(**change), Watched())
    assert said in str(caught.value)
