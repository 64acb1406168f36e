"""The loop trains, meets its memory limit, and goes on after an interruption as if there had been none."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.app.training import loop
from shoal.app.training.options import Outcome, Progress, TrainOptions
from shoal.errors import InputError
from shoal.memory.limit import memory_limit
from tests.app.training.tiny import put_in_place
from tests.engine.lossy_steps import codecs_of_no_time
from tests.raising import raising
from tests.ranks import run_on_ranks

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)
Options = Callable[..., TrainOptions]
ROOMY = 2**30


class Log:
    """A watcher that remembers, and presses Ctrl-C after a given number of steps."""

    def __init__(self, stop_after: int = -1) -> None:
        self.steps: list[Progress] = []
        self.tested: list[float] = []
        self.states: list[Any] = []
        self.stop_after = stop_after

    def planned(self, state: Any) -> None:
        self.states.append(state)

    def stepped(self, now: Progress) -> None:
        self.steps.append(now)
        if len(self.steps) == self.stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    def epoch_ended(self, last: Progress, test_accuracy: float) -> None:
        self.tested.append(test_accuracy)


def run(options: TrainOptions, stop_after: int = -1) -> Outcome:
    return loop.train(options, Log(stop_after))


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    return torch.load(outcome.checkpoint, weights_only=True)["model"]


def assert_same_training(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.accuracies == other.accuracies
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_reports_each_step_and_each_epoch(tiny: Options) -> None:
    log = Log()
    outcome = loop.train(tiny(), log)
    assert [(now.epoch, now.step, now.steps) for now in log.steps] == [(e, s, 3) for e in (1, 2) for s in (1, 2, 3)]
    assert len(outcome.losses) == 6
    assert list(outcome.accuracies) == log.tested and len(log.tested) == 2
    assert outcome.images_per_second > 0
    assert outcome.signal == 0
    assert outcome.plan is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """A run of a planner that nothing interrupts."""

    @cache
    def uninterrupted(planner: str) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            tiny = put_in_place(patch, tmp_path_factory.mktemp("whole"))
            return run(tiny(planner=planner, budget_bytes=ROOMY))

    return uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize(("planner", "stop_after"), [("none", 2), ("none", 3), ("none", 4), ("joint", 4)])
def test_an_interrupted_run_continues_bit_for_bit(
    tiny: Options, tmp_path: Path, whole: Callable[[str], Outcome], planner: str, stop_after: int
) -> None:
    """In the middle of an epoch, at its end, and in the next one."""
    uninterrupted = whole(planner)
    part = tiny(planner=planner, budget_bytes=ROOMY, out=tmp_path / "parts")
    first = run(part, stop_after)
    assert first.signal == signal.SIGINT
    assert first.losses == uninterrupted.losses[:stop_after]
    torch.manual_seed(12345)
    assert_same_training(run(replace(part, resume=True)), uninterrupted)


DRAWN = {"split": 0.5, "grid": (2, 1), "stochastic": 0.4, "planner": "none"}


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "adamw"},
        {"workers": 1},
        {"amp": "fp16"},
        DRAWN,
        {"batch_norm": "inverted", "planner": "none"},
        {"batch_norm": "icf", "planner": "none"},
    ],
)
def test_so_does_one_with(tiny: Options, tmp_path: Path, change: dict[str, Any]) -> None:
    whole = run(tiny(**change, out=tmp_path / "whole"))
    part = tiny(**change, out=tmp_path / "parts")
    run(part, stop_after=2)
    assert_same_training(run(replace(part, resume=True)), whole)


def test_so_does_one_that_encodes_what_an_earlier_choice_encoded(tiny: Options, tmp_path: Path) -> None:
    """The whole run encodes as if codecs took no time; the rest of the interrupted one would choose by other times."""
    tiny = partial(tiny, planner="joint", batch=10)  # no short last batch, which would be planned too
    roomy = run(tiny(allow="bitwise", budget_bytes=ROOMY, epochs=1, out=tmp_path / "roomy"))
    assert roomy.plan is not None
    lossy = {"allow": "bitwise, encode", "codec": "linear", "budget_bytes": int(0.85 * roomy.plan.predicted_peak_bytes)}
    part = tiny(**lossy, out=tmp_path / "parts")
    with codecs_of_no_time():
        whole = run(tiny(**lossy, out=tmp_path / "whole"))
        run(part, stop_after=2)
    assert whole.plan is not None and whole.plan.encoded, "the test shows nothing: nothing was encoded"
    resumed = run(replace(part, resume=True))
    assert_same_training(resumed, whole)
    assert resumed.plan is not None and resumed.plan.encoded == whole.plan.encoded
    assert whole.losses[1] != roomy.losses[1]


def test_a_split_run_knows_its_patches_and_an_image(tiny: Options) -> None:
    outcome = run(tiny(**DRAWN))
    assert outcome.patches is not None
    assert [len(spans) for spans in outcome.patches.cores] == [2, 1]
    assert outcome.image.startswith("data:image/png;base64,")
    assert run(tiny()).patches is None


@pytest.mark.parametrize("planner", ["none", "joint"])
def test_a_loss_that_is_not_finite_stops_the_run_and_the_last_checkpoint_stays(
    tiny: Options, monkeypatch: pytest.MonkeyPatch, planner: str
) -> None:
    options = tiny(planner=planner, budget_bytes=ROOMY)
    run(options, stop_after=1)
    before = (options.out / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(loop, "learning_rate", lambda highest, step, steps: 1e30)
    outcome = run(replace(options, resume=True))
    assert not math.isfinite(outcome.losses[-1]) and all(map(math.isfinite, outcome.losses[:-1]))
    assert outcome.diverged and len(outcome.losses) < 6 and not outcome.signal
    assert (options.out / "checkpoint.pt").read_bytes() == before


def test_weights_that_are_not_finite_are_not_saved_though_every_loss_was(
    tiny: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda *at: math.nan if at[1] == at[2] - 1 else rate(*at))
    outcome = run(tiny())
    assert all(map(math.isfinite, outcome.losses)) and len(outcome.losses) == 6
    assert outcome.diverged and len(outcome.accuracies) == 1
    assert all(bool(value.isfinite().all()) for value in weights(outcome).values())


def test_a_finished_run_has_nothing_left_to_do(tiny: Options) -> None:
    whole = run(tiny())
    again = run(tiny(resume=True))
    assert_same_training(again, whole)
    assert again.images_per_second == 0


def test_ctrl_c_in_the_last_step_of_all_finishes_the_run(tiny: Options) -> None:
    outcome = run(tiny(), stop_after=6)
    assert outcome.signal == 0
    assert len(outcome.accuracies) == 2


def test_signals_act_as_before_once_the_run_is_over(tiny: Options) -> None:
    before = signal.getsignal(signal.SIGINT)
    run(tiny(), stop_after=2)
    assert signal.getsignal(signal.SIGINT) is before


def test_shoal_and_plain_pytorch_train_the_same(tiny: Options, tmp_path: Path, whole: Callable[[str], Outcome]) -> None:
    plain = whole("none")
    log = Log()
    planned = loop.train(tiny(planner="joint", allow="bitwise", budget_bytes=ROOMY, out=tmp_path / "shoal"), log)
    assert_same_training(planned, plain)
    assert len(log.states) == 1
    assert planned.plan is not None and planned.plan.planner == "joint"
    assert planned.status is not None and planned.status.planning_seconds > 0


@needs_compiler
def test_inside_a_wall_plain_pytorch_dies_and_shoal_trains_on(tmp_path: Path) -> None:
    # In a process of its own: what other tests have left over is in use too, and no plan knows of it.
    run_on_ranks(die_plain_and_train_on_planned, 1, tmp_path)


def die_plain_and_train_on_planned(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        tiny = put_in_place(patch, folder)
        need = run(tiny(out=folder / "plain")).measured_peak_bytes
        assert need is not None
        budget = int(0.7 * need)
        with pytest.raises(torch.OutOfMemoryError, match=f"the limit is {budget}"):
            run(tiny(budget_bytes=budget, enforce=True, out=folder / "dead"))
        outcome = run(tiny(planner="joint", budget_bytes=budget, enforce=True, out=folder / "alive"))
        assert outcome.measured_peak_bytes is not None and outcome.measured_peak_bytes <= budget
        assert len(outcome.losses) == 6


@needs_compiler
def test_the_peak_holds_the_weights_and_the_batch(tiny: Options) -> None:
    outcome = run(tiny(epochs=1))
    held = sum(tensor.nbytes for tensor in weights(outcome).values()) + 8 * 3 * 16 * 16 * 4
    assert outcome.measured_peak_bytes is not None and outcome.measured_peak_bytes > 2 * held


@needs_compiler
def test_what_the_process_holds_beside_is_no_part_of_the_peak_nor_of_the_limit(tiny: Options) -> None:
    alone = run(tiny(epochs=1)).measured_peak_bytes
    assert alone is not None
    with memory_limit(None):
        held = torch.empty(2**20)
        beside = run(tiny(epochs=1, enforce=True, budget_bytes=alone))
    assert beside.measured_peak_bytes == alone < held.nbytes


@pytest.mark.parametrize("change", [{"amp": "bf16"}, {"channels_last": True}, {"momentum": 0.0, "weight_decay": 0.0}])
def test_it_trains_with(tiny: Options, change: dict[str, Any]) -> None:
    losses = run(tiny(epochs=4, **change)).losses
    assert sum(losses[-3:]) < sum(losses[:3])


def test_a_last_batch_of_one_image_is_left_out(tiny: Options) -> None:
    log = Log()
    loop.train(tiny(batch=19, epochs=1), log)
    assert [now.step for now in log.steps] == [1]


def test_resuming_with_other_arguments_is_refused(tiny: Options) -> None:
    run(tiny())
    with raising(InputError, "lr=0.02", "0.5"):
        run(tiny(resume=True, lr=0.5))


def test_a_network_that_answers_per_pixel_needs_labels_per_pixel(tmp_path: Path) -> None:
    with raising(InputError, "'digits'"):
        run(TrainOptions(model="examples.networks.unet:unet", data="digits", planner="none", out=tmp_path))


def test_images_too_small_for_the_network_are_refused(tmp_path: Path) -> None:
    with raising(InputError, "16"):
        model = "examples.networks.alexnet:AlexNet"
        run(
            TrainOptions(
                model=model, data="examples.data.synthetic:open_synthetic", image=16, planner="none", out=tmp_path
            )
        )


@pytest.mark.parametrize("data", ["examples.data.synthetic:open_synthetic", "digits"])
def test_a_network_that_returns_no_tensor_is_refused_whatever_the_data(data: str, tmp_path: Path) -> None:
    (tmp_path / "pair.py").write_text(
        "from torch import nn\n"
        "class Pair(nn.Conv2d):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x), x\n"
        "def pair():\n"
        "    return Pair(1, 10, 3)\n"
    )
    with raising(InputError, "tuple"):
        run(TrainOptions(model=f"{tmp_path}/pair.py:pair", data=data, planner="none", out=tmp_path / "out"))
