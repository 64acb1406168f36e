"""Numbers to try codecs on: from a file, or random."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.errors import InputError, brief

DRAWN_ELEMS = 1 << 20
_MOST_ELEMS = 1 << 45  # float32 numbers that a process can address
# normal and uniform are those of Dettmers 2016, table 1; relu is what a convolution reads.
DISTRIBUTIONS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "normal": lambda elems, generator: torch.randn(elems, generator=generator),
    "uniform": lambda elems, generator: torch.rand(elems, generator=generator),
    "laplace": lambda elems, generator: _laplace(torch.rand(elems, generator=generator)),
    "lognormal": lambda elems, generator: torch.randn(elems, generator=generator).exp_(),
    "relu": lambda elems, generator: torch.randn(elems, generator=generator).relu_(),
}


def drawn(distribution: str, elems: int, seed: int = 0) -> torch.Tensor:
    """(elems,) float32 of a distribution of scale 1.

    Raises:
        InputError: it is unknown, or `elems` is not positive.

    >>> drawn("uniform", 3, seed=1)
    tensor([0.7576, 0.2793, 0.4031])
    """
    if distribution not in DISTRIBUTIONS:
        raise InputError(f"unknown distribution {distribution!r}: choose one of {', '.join(DISTRIBUTIONS)}")
    if not 1 <= elems <= _MOST_ELEMS:
        raise InputError(f"elements={brief(elems)}: it must be at least 1 and at most 2**45")
    return DISTRIBUTIONS[distribution](elems, torch.Generator().manual_seed(seed))


def read(path: str | Path, elems: int | None = None) -> torch.Tensor:
    """The floating-point numbers of a file as (n,) float32.

    Args:
        path: a .npy array; a .pt or .pth tensor, or dictionary of tensors such as a state_dict, all of whose
            floating-point numbers are taken one after another; any other: raw float32, little-endian.
        elems: the first that many; None: all.

    Raises:
        InputError: the file is not there, is none of these, or holds no floating-point number.
    """
    path = Path(path)
    if elems is not None and elems < 1:
        raise InputError(f"elements={elems}: it must be at least 1")
    reader = {".npy": _read_npy, ".pt": _read_torch, ".pth": _read_torch}.get(path.suffix.lower(), _read_raw)
    try:
        values = reader(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; give a file of numbers") from error
    if values.numel() == 0:
        raise InputError(f"{path} is empty; give a file of numbers")
    return values.flatten()[: min(elems or values.numel(), values.numel())].float().contiguous()


def _read_npy(path: Path) -> torch.Tensor:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # as many kinds as there are ways to be no such file
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise InputError(f"{path} is not an array of numbers ({reason}); write it with numpy.save") from error
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(f"{path} holds {array.dtype}, expected float16, float32 or float64; convert it first")
    # A copy: torch knows neither read-only nor byte-swapped arrays.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _read_torch(path: Path) -> torch.Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch makes of bytes that are no file of its own
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # as many kinds as there are ways to be no such file
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")
        raise InputError(f"{path} is not a file of tensors ({reason}); write a tensor with torch.save") from error
    found = [tensor.detach().flatten().float() for tensor in _tensors(loaded) if tensor.is_floating_point()]
    if not found:
        raise InputError(f"{path} holds no floating-point tensor; write one, or a state_dict, with torch.save")
    return torch.cat(found)


def _tensors(loaded: Any) -> list[torch.Tensor]:
    if isinstance(loaded, torch.Tensor):
        return [loaded]
    parts = loaded.values() if isinstance(loaded, dict) else loaded if isinstance(loaded, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _read_raw(path: Path) -> torch.Tensor:
    data = path.read_bytes()
    if len(data) % 4:
        raise InputError(f"{path} has {len(data)} bytes, not a multiple of 4; give .npy, .pt or raw float32")
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))


def _laplace(uniform: torch.Tensor) -> torch.Tensor:
    centred = uniform.sub_(0.5)
    return centred.sign() * -torch.log1p(-2 * centred.abs())
