"""A bit for each value tells whether it is > 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import codecs
from shoal.codecs.sign_mask import decode, encode
from shoal.errors import CodecError
from tests.raising import raising


@given(st.lists(st.floats(width=32), max_size=70))
def test_bits_are_set_where_a_value_is_positive_the_first_in_the_lowest(values: list[float]) -> None:
    x = torch.tensor(values)
    mask = torch.full((-(-len(values) // 8),), 0xA5, dtype=torch.uint8)
    encode(x, mask)
    assert mask.numpy().tobytes() == np.packbits(np.array([v > 0 for v in values], bool), bitorder="little").tobytes()
    out = torch.ones(len(values), dtype=torch.bool)
    decode(mask, out)
    assert out.tolist() == [value > 0 for value in values]


@pytest.mark.parametrize("elems", [65535, 65536, 65537, 200_001])
def test_any_number_of_values(elems: int) -> None:
    x = torch.randn(elems)
    assert torch.equal(codecs.get("sign_mask").encode(x).decode(), x > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool])
def test_whatever_the_dtype_a_bool_of_the_same_strides_comes_back(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 4).gt(0.3).to(dtype).to(memory_format=torch.channels_last)
    encoded = codecs.get("sign_mask").encode(x)
    assert encoded.nbytes == 15
    decoded = encoded.decode()
    assert (decoded.dtype, decoded.stride()) == (torch.bool, x.stride())
    assert torch.equal(decoded, x > 0)


def test_it_is_all_that_the_gradient_of_a_relu_needs() -> None:
    x = torch.randn(100, requires_grad=True)
    torch.relu(x).sum().backward()
    assert torch.equal(codecs.get("sign_mask").encode(torch.relu(x)).decode().float(), x.grad)


def test_tensors_of_another_kind_are_refused() -> None:
    with pytest.raises(CodecError):
        encode(torch.ones(9), torch.empty(1, dtype=torch.uint8))
    with raising(CodecError, "torch.int64"):
        encode(torch.ones(9).long(), torch.empty(2, dtype=torch.uint8))
    with raising(CodecError, "torch.float32"):
        decode(torch.empty(2, dtype=torch.uint8), torch.ones(9))
