"""`python -m examples.try_codecs`: how each codec encodes given numbers on this machine: bytes, error, speed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

import shoal.codecs
from shoal.app.cli.console import errors_reported, output
from shoal.app.training.prepare import device as device_called
from shoal.codecs import Codec, get, names
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.registry import needed
from shoal.core.columns import grid
from shoal.core.files import json_text
from shoal.cost.measure import fastest_seconds
from shoal.errors import InputError, brief

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

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


@app.command()
def codecs(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="An array in .npy, tensors in .pt, or raw float32.")] = None,
    distribution: Annotated[str | None, typer.Option(help=f"Draw numbers instead: {', '.join(DISTRIBUTIONS)}.")] = None,
    elements: Annotated[
        int | None, typer.Option(help="How many to draw (by default 1048576), or to take from the file.")
    ] = None,
    codec: Annotated[list[str] | None, typer.Option(help="Only this one; may be given again.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what each codec makes of some numbers on this machine: bytes, error, speed.

    GB/s are of float32 that is encoded, or made by decoding. A link faster than the break-even bandwidth carries the
    numbers as they are in less time than it takes to encode and decode them.
    """
    with errors_reported(ctx):
        if file is not None and distribution is not None:
            raise InputError(f"got both {file} and --distribution {distribution}; give one of them")
        chosen = [of_values(shoal.codecs.get(name)) for name in codec or tryable_names()]
        place = device_called(device)
        if file is None:
            name = distribution or "normal"
            values = drawn(name, DRAWN_ELEMS if elements is None else elements)
        else:
            name, values = str(file), read(file, elements)
        tried = [try_codec(each, values.to(place)) for each in chosen]
        if json:
            rows = [each.to_json() for each in tried]
            where = {
                "source": name,
                "elements": values.numel(),
                "device": str(place),
                "threads": torch.get_num_threads(),
            }
            typer.echo(json_text({**where, "codecs": rows}))
        else:
            output().print(columns(tried, f"{name}: {values.numel():,} float32 on {place}"))


_RATES = ("encode_gbps", "decode_gbps", "break_even_gbps")


@dataclass(frozen=True)
class Trial:
    """One codec on one tensor.

    Attributes:
        codec: its name.
        raw_bytes, payload_bytes: as float32, and encoded.
        largest_error, mean_error: absolute, of the values that are finite before and after.
        largest_relative_error, mean_relative_error: of those that are not zero.
        lost: finite values that came back infinite or as NaN.
        encode_seconds, decode_seconds: the fastest of several, into existing memory.
    """

    codec: str
    raw_bytes: int
    payload_bytes: int
    largest_error: float
    mean_error: float
    largest_relative_error: float
    mean_relative_error: float
    lost: int
    encode_seconds: float
    decode_seconds: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes."""
        return self.raw_bytes / self.payload_bytes

    @property
    def encode_gbps(self) -> float:
        """10**9 bytes of float32 a second."""
        return self.raw_bytes / self.encode_seconds / 1e9

    @property
    def decode_gbps(self) -> float:
        """10**9 bytes of float32 a second."""
        return self.raw_bytes / self.decode_seconds / 1e9

    @property
    def break_even_gbps(self) -> float:
        """The speed of a link from which on sending the values as they are takes less time."""
        return (self.raw_bytes - self.payload_bytes) / (self.encode_seconds + self.decode_seconds) / 1e9

    def to_json(self) -> dict[str, float | int | str]:
        """Every figure by its name, with its unit."""
        figures = {name: value for name, value in asdict(self).items() if not name.endswith("_seconds")}
        return figures | {name: getattr(self, name) for name in ("ratio", *_RATES)}


def try_codec(codec: FloatCodec, values: torch.Tensor) -> Trial:
    """Encode and decode `values`, (n,) float32, n > 0.

    >>> from shoal.codecs import get
    >>> tried = try_codec(get("bf16"), torch.tensor([1.0, 1.00390625]))
    >>> tried.ratio, tried.largest_error, tried.lost
    (2.0, 0.00390625, 0)
    """
    payload = torch.empty(codec.bytes_for(values.shape), dtype=torch.uint8, device=values.device)
    encoded = codec.encode(values, out=payload)
    decoded = codec.decode(encoded)
    encode_seconds = fastest_seconds(lambda: codec.encode(values, out=payload), values.device)
    decode_seconds = fastest_seconds(lambda: codec.decode(encoded, out=decoded), values.device)
    finite = values.isfinite()
    kept = decoded.isfinite()
    exact = values[finite & kept].double()
    error = decoded[finite & kept].double().sub_(exact).abs_()
    relative = (error / exact.abs())[exact != 0]
    return Trial(
        codec=codec.name,
        raw_bytes=values.nbytes,
        payload_bytes=payload.numel(),
        largest_error=_largest(error),
        mean_error=_mean(error),
        largest_relative_error=_largest(relative),
        mean_relative_error=_mean(relative),
        lost=int((finite & ~kept).sum()),
        encode_seconds=encode_seconds,
        decode_seconds=decode_seconds,
    )


def columns(trials: Iterable[Trial], title: str) -> Table:
    """A table with a row a codec."""
    headings = (
        "codec", "bytes", "ratio", "max error", "mean error", "max relative", "mean relative", "lost", "encode GB/s",
        "decode GB/s", "break-even GB/s",
    )  # fmt: skip
    rows = [
        (
            trial.codec,
            f"{trial.payload_bytes:,}",
            f"{trial.ratio:.2f}",
            f"{trial.largest_error:.3g}",
            f"{trial.mean_error:.3g}",
            f"{100 * trial.largest_relative_error:.4g} %",
            f"{100 * trial.mean_relative_error:.4g} %",
            f"{trial.lost:,}",
            f"{trial.encode_gbps:.2f}",
            f"{trial.decode_gbps:.2f}",
            f"{trial.break_even_gbps:.2f}",
        )
        for trial in trials
    ]
    return grid(title, headings, rows, left=("codec",))


def tryable_names() -> list[str]:
    """Of the codecs that keep values, and so have an error to measure."""
    return [name for name in names() if not needed(name) and isinstance(get(name), FloatCodec)]


def of_values(codec: Codec) -> FloatCodec:
    """`codec` itself.

    Raises:
        InputError: it keeps no values.
    """
    if not isinstance(codec, FloatCodec):
        raise InputError(
            f"{codec.name} keeps no values, and so has no error; choose one of {', '.join(tryable_names())}"
        )
    return codec


def _largest(errors: torch.Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def _mean(errors: torch.Tensor) -> float:
    return float(errors.mean()) if errors.numel() else 0.0


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


@contextmanager
def _only(path: Path, kind: str, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # as many kinds as there are ways to be no such file
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")[:160]
        raise InputError(f"{path} is not {kind} ({reason}); {advice}") from error


def _read_npy(path: Path) -> torch.Tensor:
    with _only(path, "an array of numbers", "write it with numpy.save"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(f"{path} holds {array.dtype}, expected float16, float32 or float64; convert it first")
    # A copy: torch knows neither read-only nor byte-swapped arrays.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _read_torch(path: Path) -> torch.Tensor:
    with _only(path, "a file of tensors", "write a tensor with torch.save"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch makes of bytes that are no file of its own
        loaded = torch.load(path, map_location="cpu", weights_only=True)
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


if __name__ == "__main__":
    app()
