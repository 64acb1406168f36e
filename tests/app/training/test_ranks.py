"""Several ranks train as one does, stop together, go on bit for bit, and end together."""

from __future__ import annotations

import io
import os
import signal
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal.app.data
import shoal.app.models
from shoal.app.cli import console
from shoal.app.cli import train as command
from shoal.app.training import loop
from shoal.app.training.options import Outcome, Progress
from shoal.app.training.ranks import Ranks
from shoal.errors import InputError, TransferError
from tests.app.training.tiny import put_in_place
from tests.ranks import run_on_ranks

ROOMY = 2**30


class Watched:
    """Presses Ctrl-C on one rank after a number of steps."""

    def __init__(self, stop_after: int = -1) -> None:
        self.left = stop_after

    def planned(self, state: Any) -> None: ...

    def stepped(self, now: Progress) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def epoch_ended(self, last: Progress, test_accuracy: float) -> None: ...


class Smooth(nn.Module):
    """Nothing in it looks beyond one image."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.convolution(images)).mean((2, 3)))


def these_ranks() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), 200.0, grouped=True)


def facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "losses": outcome.losses,
        "accuracies": outcome.accuracies,
        "signal": outcome.signal,
        "peak": outcome.measured_peak_bytes,
        "predicted": outcome.predicted_peak_bytes,
        "traffic": outcome.traffic,
    }


def train_smooth(ranks: Ranks, out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """21 images in batches of 8: the last of an epoch has 5, which two ranks share unevenly."""
    with pytest.MonkeyPatch.context() as patch:
        tiny = put_in_place(patch, out)
        patch.setattr(shoal.app.models, "find", lambda name: Smooth)
        patch.setattr(shoal.app.data, "open", partial(shoal.app.data.open, train_samples=21, test_samples=7))
        outcome = loop.train(tiny(epochs=3, out=out), Watched(), ranks)
        return facts(outcome), torch.load(outcome.checkpoint, weights_only=True)["model"]


def train_smooth_together(out: Path) -> Any:
    return train_smooth(these_ranks(), out)


def test_two_ranks_train_as_one_with_the_whole_batch(tmp_path: Path) -> None:
    """But for the order of sums: a few roundings of 6e-8 a step."""
    alone, weights = train_smooth(Ranks(), tmp_path / "alone")
    first, second = run_on_ranks(train_smooth_together, 2, tmp_path / "together")
    assert first[0] | {"peak": 0} == second[0] | {"peak": 0}
    together, theirs = first
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert together["accuracies"] == alone["accuracies"]
    for name, weight in weights.items():
        assert torch.allclose(theirs[name], weight, rtol=1e-5, atol=1e-6)


def train_in_two_parts(out: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Without an interruption; with one on the last rank; and resumed."""
    ranks = these_ranks()
    with pytest.MonkeyPatch.context() as patch:
        tiny = put_in_place(patch, out)
        whole = loop.train(tiny(**options, out=out / "whole"), Watched(), ranks)
        asked = tiny(**options, out=out / "parts")
        watched = Watched(2 if ranks.rank == ranks.count - 1 else -1)
        part = loop.train(asked, watched, ranks)
        torch.manual_seed(12345)
        resumed = loop.train(replace(asked, resume=True), Watched(), ranks)
        return [facts(outcome) for outcome in (whole, part, resumed)]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(3, {"batch": 6}), (2, {"batch": 10, "planner": "joint", "budget_bytes": ROOMY})],
)
def test_a_signal_to_one_rank_stops_all_and_they_continue_bit_for_bit(
    tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    for whole, part, resumed in run_on_ranks(train_in_two_parts, ranks, tmp_path, options):
        assert part["signal"] == signal.SIGINT
        assert 2 <= len(part["losses"]) <= 3  # a signal that comes after the ranks agreed is heard in the next step
        assert part["losses"] == whole["losses"][: len(part["losses"])]
        assert resumed["losses"] == whole["losses"]
        assert resumed["accuracies"] == whole["accuracies"]
        assert resumed["signal"] == 0
    weights = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def fail_on_the_last_rank(out: Path) -> tuple[int | str, str, str]:
    """How `shoal train` ends where one rank meets a sample that cannot be read."""
    ranks = these_ranks()
    with pytest.MonkeyPatch.context() as patch:
        tiny = put_in_place(patch, out)
        said: list[str] = []
        patch.setattr(command, "report_error", lambda text, ctx: said.append(text))
        if ranks.rank == ranks.count - 1:
            patch.setattr(Watched, "stepped", _refuse)
            patch.setattr(command, "Display", lambda *_: _Shown())
        shown = io.StringIO()
        with redirect_stdout(shown):
            code = command._train(tiny(), None, ranks)
        return code, " ".join(said), shown.getvalue()


class _Shown(Watched):
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _refuse(self: Watched, now: Progress) -> None:
    raise InputError("sample 7 cannot be read; mend it")


def test_an_error_on_one_rank_is_reported_once_by_its_name_and_ends_all(tmp_path: Path) -> None:
    # The rank that failed stays, as one does that hangs in its way out: the other learns it by its own timeout.
    ended = run_on_ranks(fail_and_leave, 2, tmp_path, may_end=(1,))
    code, said, _ = ended[0]
    assert code == console.WRONG
    assert said == ""  # rank 1 reported it
    told = (tmp_path / "told").read_text()
    assert told == "rank 1: sample 7 cannot be read; mend it"


def fail_and_leave(out: Path) -> tuple[int | str, str, str]:
    code, said, shown = fail_on_the_last_rank(out)
    if dist.get_rank() == 1:
        (out / "told").write_text(said)
        os._exit(int(code))
    return code, said, shown


def leave_in_mid_run(out: Path) -> str:
    ranks = these_ranks()
    with pytest.MonkeyPatch.context() as patch:
        tiny = put_in_place(patch, out)
        if ranks.rank == 1:
            patch.setattr(Watched, "stepped", lambda self, now: os._exit(9))
        try:
            loop.train(tiny(), Watched(), ranks)
        except TransferError as error:
            return str(error)
    return "it trained on"


def test_a_rank_that_is_killed_is_missed_by_the_others(tmp_path: Path) -> None:
    said, _ = run_on_ranks(leave_in_mid_run, 2, tmp_path, may_end=(1,))
    assert said.startswith("lost another of the 2 ranks")
    assert "continue with --resume" in said


def refuse_an_odd_batch(out: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError) as caught:
        loop.train(put_in_place(patch, out)(batch=7), Watched(), these_ranks())
    return str(caught.value)


def test_a_batch_that_ranks_cannot_share_evenly_is_refused(tmp_path: Path) -> None:
    said = run_on_ranks(refuse_an_odd_batch, 2, tmp_path)
    assert said == ["batch=7 over 2 ranks: give a multiple of 2"] * 2


def train_unlike(out: Path) -> list[str]:
    ranks = these_ranks()
    told = []
    with pytest.MonkeyPatch.context() as patch:
        tiny = put_in_place(patch, out)
        for mine in ({"compress_gradients": [None, "dynamic_tree"]}, {"lr": [0.1, 0.2]}, {"resume": [False, True]}):
            options = {name: by_rank[ranks.rank] for name, by_rank in mine.items()}
            with pytest.raises(TransferError) as caught:
                loop.train(tiny(**options), Watched(), ranks)
            told.append(str(caught.value))
    return told


def test_ranks_with_other_arguments_are_reported_before_they_train(tmp_path: Path) -> None:
    first, second = run_on_ranks(train_unlike, 2, tmp_path, timeout_seconds=250)
    assert first == second
    for told, words in zip(
        first,
        [
            "compress_gradients None on rank 0, dynamic_tree on rank 1",
            "lr 0.1 on rank 0, 0.2 on rank 1",
            "resume False on rank 0, True on rank 1",
        ],
        strict=True,
    ):
        assert told.startswith(f"shoal train: ranks differ: got {words};")
