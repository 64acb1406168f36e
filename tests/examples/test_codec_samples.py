"""Numbers from files of every kind, and what is told of a file that holds none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.try_codecs import DISTRIBUTIONS, drawn, read
from shoal.errors import InputError
from tests.raising import raising

X = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, -7.0]])


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.npy", lambda path: np.save(path, X.numpy())),
        ("float64.npy", lambda path: np.save(path, X.double().numpy())),
        ("float16.npy", lambda path: np.save(path, X.half().numpy())),
        ("big_endian.npy", lambda path: np.save(path, X.numpy().astype(">f4"))),
        ("fortran.npy", lambda path: np.save(path, np.asfortranarray(X.numpy()))),
        ("x.pt", lambda path: torch.save(X, path)),
        ("x.pth", lambda path: torch.save(X.bfloat16(), path)),
        ("parameter.pt", lambda path: torch.save(torch.nn.Parameter(X), path)),
        ("state.pt", lambda path: torch.save({"a": X[0], "steps": torch.tensor(3), "inner": {"b": X[1]}}, path)),
        ("raw", lambda path: path.write_bytes(X.numpy().tobytes())),
        ("raw.f32", lambda path: path.write_bytes(X.numpy().tobytes())),
    ],
)
def test_numbers_are_read_one_after_another_as_float32(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    values = read(tmp_path / name)
    assert values.dtype == torch.float32
    assert values.tolist() == X.flatten().tolist()
    assert read(tmp_path / name, 4).tolist() == X.flatten().tolist()[:4]
    assert len(read(tmp_path / name, 100)) == 6


class Unsafe:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("this must not run",)


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("missing.npy", lambda path: None, "No such file"),
        ("folder.npy", lambda path: path.mkdir(), "cannot read"),
        ("missing", lambda path: None, "No such file"),
        ("text.npy", lambda path: path.write_text("hello"), "is not an array"),
        ("empty.npy", lambda path: path.write_bytes(b""), "is not an array"),
        (
            "objects.npy",
            lambda path: np.save(path, np.array([Unsafe()]), allow_pickle=True),
            "is not an array of numbers",
        ),
        (
            "cut.npy",
            lambda path: (np.save(path, X.numpy()), path.write_bytes(path.read_bytes()[:-4])),
            "is not an array",
        ),
        ("ints.npy", lambda path: np.save(path, np.arange(3)), "holds int64, expected float16"),
        ("none.npy", lambda path: np.save(path, np.empty(0, np.float32)), "is empty; give a file of numbers"),
        ("text.pt", lambda path: path.write_text("hello"), "is not a file of tensors"),
        ("empty.pt", lambda path: path.write_bytes(b""), "is not a file of tensors"),
        ("unsafe.pt", lambda path: torch.save(Unsafe(), path), "is not a file of tensors"),
        (
            "cut.pt",
            lambda path: (torch.save(X, path), path.write_bytes(path.read_bytes()[:-300])),
            "is not a file of tensors",
        ),
        ("ints.pt", lambda path: torch.save(torch.arange(3), path), "holds no floating-point tensor"),
        ("number.pt", lambda path: torch.save({"lr": 0.1}, path), "holds no floating-point tensor"),
        ("none.pt", lambda path: torch.save(torch.empty(0), path), "is empty; give a file of numbers"),
        ("odd.bin", lambda path: path.write_bytes(b"\0" * 7), "has 7 bytes, not a multiple of 4"),
        ("none.bin", lambda path: path.write_bytes(b""), "is empty; give a file of numbers"),
    ],
)
def test_a_file_of_none_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, write: Callable[[Path], None], said: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(InputError) as told:
        read(tmp_path / name)
    assert said in str(told.value)
    assert str(tmp_path / name) in str(told.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("distribution", "mean", "spread"),
    [("normal", 0, 1), ("uniform", 0.5, 1 / 12**0.5), ("laplace", 0, 2**0.5), ("lognormal", 1.6487, 2.1612)],
)
def test_numbers_are_drawn_as_told(distribution: str, mean: float, spread: float) -> None:
    values = drawn(distribution, 200_000).double()
    assert abs(values.mean() - mean) < 0.02 * (1 + spread)
    assert abs(values.std() - spread) < 0.04 * spread


def test_a_relus_numbers_are_half_zeros() -> None:
    values = drawn("relu", 10_000)
    assert (values >= 0).all()
    assert abs((values == 0).float().mean() - 0.5) < 0.03


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_same_seed_draws_the_same_finite_numbers(distribution: str) -> None:
    assert torch.equal(drawn(distribution, 1000), drawn(distribution, 1000))
    assert not torch.equal(drawn(distribution, 1000), drawn(distribution, 1000, seed=1))
    assert drawn(distribution, 1000).isfinite().all()


def test_nothing_is_drawn_of_what_is_not_known(tmp_path: Path) -> None:
    with raising(InputError, "'cauchy'"):
        drawn("cauchy", 5)
    for elems in (0, -1):
        with raising(InputError, f"elements={elems}"):
            drawn("normal", elems)
        with raising(InputError, f"elements={elems}"):
            read(tmp_path, elems)
