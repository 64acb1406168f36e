"""Copies between rows at different distances: on CUDA where there is one, else interpreted; and by PyTorch.

`tests.test_interpreter` runs these in the interpreter.
"""

from __future__ import annotations

import pytest
import torch

from shoal.kernels import odd_products
from shoal.kernels.odd_products import TRITON, copy_rows
from tests.interpreter import not_interpreted, on_device, with_triton
from tests.kernels_elsewhere import compiled_for, each_capability, kernels_of

SIZES = [(1, 1), (3, 5), (2, 4096), (5, 4097), (0, 3), (7, 9001)]


def check(kernels: str, device: str, dtype: torch.dtype, columns_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", kernels)
    for n_rows, n_columns in SIZES:
        narrow = torch.randn(n_rows, n_columns, device=device).to(dtype)
        for into_gap, gap in ((0, 7), (7, 0), (3, 5)):
            rows, into = (torch.zeros(n_rows, n_columns + n, device=device, dtype=dtype) for n in (gap, into_gap))
            rows[:, :n_columns] = narrow
            pair = into[:, :n_columns], rows[:, :n_columns]
            assert kernels == "reference" or TRITON.applies(*pair) or not n_rows
            copy_rows(*(one.t() for one in pair) if columns_first else pair)
            assert torch.equal(into[:, :n_columns], narrow)
            assert not into[:, n_columns:].any()  # what lies between is not written


@on_device
@with_triton
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_copied_and_nothing_beside_them(
    dtype: torch.dtype, columns_first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("triton", device, dtype, columns_first, monkeypatch)


@not_interpreted
@pytest.mark.parametrize("columns_first", [False, True])
def test_so_does_the_reference(columns_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check("reference", "cpu", torch.bfloat16, columns_first, monkeypatch)


@with_triton
@not_interpreted
@each_capability
def test_it_compiles_for_a_device_that_is_not_here(capability: int) -> None:
    """Threads read and write neighbours, element by element."""
    from shoal.kernels import row_copies_triton_kernels

    into, rows = (torch.empty(8192, size, dtype=torch.bfloat16, device="meta") for size in (50257, 50304))
    with compiled_for(capability) as found:
        odd_products.TRITON.copy(into, rows[:, :50257])
    assert found.keys() == kernels_of(row_copies_triton_kernels)
    for ptx in found["copy_blocks"]:
        assert "ld.global.b16" in ptx and "st.global.b16" in ptx
        assert ".v4" not in ptx and ".v2" not in ptx
