"""A run on disk: everything the next step depends on, written whole or not at all."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.app.training.ranks import Ranks
from shoal.app.training.saved_state import UnfitError, check_optimizer, check_scaler, check_weights, with_settings
from shoal.app.training.strategy import Strategy
from shoal.core.files import write_atomically
from shoal.core.records import read_record
from shoal.core.variant import Variant
from shoal.engine.status import Status
from shoal.errors import InputError, ShoalError, brief
from shoal.lowlevel import cuda_calls

_FORMAT = "shoal-checkpoint"
_VERSION = 2


@dataclass
class Position:
    """Where a run stands, between two steps.

    Attributes:
        epoch: counted from 0, the one being trained.
        step: how many of its steps are done.
        loss_sum, right, answers: over the images of this epoch so far.
        losses: one per step since the run began.
        accuracies: on the test images, one per finished epoch.
    """

    epoch: int
    step: int
    loss_sum: float
    right: int
    answers: int
    losses: list[float]
    accuracies: list[float]

    @staticmethod
    def start() -> Position:
        """Before the first step."""
        return Position(0, 0, 0.0, 0, 0, [], [])

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.step = 0
        self.loss_sum = 0.0
        self.right = self.answers = 0


def save(
    path: Path,
    arguments: Mapping[str, Any],
    position: Position,
    strategy: Strategy,
    scaler: torch.amp.GradScaler,
    ranks: Ranks | None = None,
) -> Path:
    """Write the run's state, generators included. Every rank calls it, and rank 0 writes.

    Raises:
        InputError: the folder is not writable or the disk is full; an earlier checkpoint is untouched.
    """
    ranks = ranks or Ranks()
    own = {
        "encoded": {step: list(names) for step, names in _status(strategy.network).encoded.items()},
        "variants": {inputs: asdict(variant) for inputs, variant in _status(strategy.network).variants.items()},
        "generator": torch.get_rng_state(),
        "cuda_generators": cuda_calls.generator_states(),
        "travel": strategy.own_state(),
    }
    whole_state, every = strategy.state(), ranks.collect(own)
    if not ranks.first:
        return path
    state = {
        "format": _FORMAT,
        "version": _VERSION,
        "arguments": dict(arguments),
        "position": dict(vars(position)),
        **whole_state,
        "scaler": scaler.state_dict(),
        "ranks": every,
    }
    # To memory first: on a full disk torch's writer hides the reason.
    whole = io.BytesIO()
    torch.save(state, whole)
    return write_atomically(path, lambda file: file.write(whole.getbuffer()))


def load(
    path: Path,
    arguments: Mapping[str, Any],
    strategy: Strategy,
    scaler: torch.amp.GradScaler,
    ranks: Ranks | None = None,
) -> Position:
    """Put a run back where `save` found it. Runs no code from the file. Every rank calls it and reads the file.

    Args:
        path: of the checkpoint.
        arguments: those of this run; they must equal the checkpoint's.
        strategy, scaler: freshly made with those arguments; filled in.
        ranks: which of them this is; None: the only one.

    Raises:
        InputError: the file is missing, damaged or no checkpoint, or another run's, by its arguments or the settings of
            its optimizer; or a state in it is of no parameter here, of another shape or type, or not finite.
    """
    if not path.is_file():
        raise InputError(f"there is no checkpoint {path} to resume from; run without --resume, or give the run's --out")
    state = _read(path)
    differing = [
        f"{name}={brief(state['arguments'].get(name))} there and {brief(arguments.get(name))} here"
        for name in {**arguments, **state["arguments"]}
        if state["arguments"].get(name) != arguments.get(name)
    ]
    if differing:
        if len(differing) > 4:
            differing[4:] = [f"and {len(differing) - 4} more"]
        raise InputError(f"{path} belongs to another run ({'; '.join(differing)}); resume with the same arguments")
    try:
        own = state["ranks"][ranks.rank if ranks else 0]
        position = _position(state["position"])
        # A step that a scaler leaves out leaves no state of an optimizer.
        stepped = bool(position.losses) and (not scaler.is_enabled() or bool(state["optimizer"]["state"]))
        check_weights(state["model"], strategy.network.state_dict())
        check_optimizer(state["optimizer"], strategy.optimizer, strategy.groups(), stepped=stepped)
        check_scaler(state["scaler"], scaler)
        strategy.load_state({**state, "optimizer": with_settings(state["optimizer"], strategy.optimizer)})
        strategy.load_own_state(own["travel"])
        scaler.load_state_dict(state["scaler"])
        status = _status(strategy.network)
        status.encoded.update({step: tuple(names) for step, names in own["encoded"].items()})
        for inputs, chosen in own["variants"].items():
            status.variants[inputs] = read_record(Variant, chosen, "variant")
        torch.set_rng_state(own["generator"])
        cuda_calls.set_generator_states(own["cuda_generators"])
        return position
    except (ShoalError, torch.OutOfMemoryError):
        raise
    except UnfitError as error:
        raise InputError(f"{path} {error}; run without --resume to start again") from None
    except Exception as error:  # a state of any kind may lie in a sound file
        raise InputError(
            f"{path} does not fit this model ({_first_line(error)}); run without --resume to start again"
        ) from error


def _status(model: torch.nn.Module) -> Status:
    """What `shoal.compile` chose, which the numbers of a run depend on; nothing where it planned nothing."""
    return getattr(model, "shoal", None) or Status(None)


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as parts:
            damaged = parts.testzip()  # torch itself does not compare checksums
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum in {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] != _FORMAT or state["version"] != _VERSION or not isinstance(state["arguments"], dict):
            raise ValueError(f"format {state['format']!r} of version {state['version']!r}")
    except PermissionError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; make it readable") from error
    except Exception as error:  # as many kinds as there are ways to be damaged: EOFError, struct.error, zlib.error, ...
        raise InputError(
            f"{path} is damaged or not a Shoal checkpoint ({_first_line(error)}); "
            "run without --resume to start again, or give another --out"
        ) from error
    return state


def _position(saved: Mapping[str, Any]) -> Position:
    """Where the run stood.

    Raises:
        TypeError: it is not a position.
    """
    position = Position(**saved)
    counts = (position.epoch, position.step, position.right, position.answers)
    numbers = (position.loss_sum, *position.losses, *position.accuracies)
    if any(type(count) is not int or count < 0 for count in counts) or any(type(n) is not float for n in numbers):
        raise TypeError("its position is not of numbers")
    return position


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
