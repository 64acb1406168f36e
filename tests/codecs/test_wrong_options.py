"""Every option of every codec, given a value of every wrong kind: refused in one line, or a codec that works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.codecs import from_bytes, get, names, registry
from shoal.engine.options import Options
from shoal.errors import CodecError, InputError
from tests.codecs.every_codec import POOL
from tests.engine.compile.wrong_values import WRONG, is_readable
from tests.raising import raising

OPTIONS = [(name, option) for name in names() for option in (*registry._kinds[name].options, "nonsense")]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_wrong_option_is_refused_in_one_line_or_makes_a_codec_that_works(name: str, option: str) -> None:
    needed = POOL if name == "pool_index" else {}
    x = torch.linspace(-2, 2, 15)
    refused = 0
    for value in WRONG:
        try:
            codec = get(name, **{**needed, option: value})
        except CodecError as error:
            assert is_readable(error), value
            assert name in str(error)
            refused += 1
        else:
            assert get(name, **codec.options) == codec
            if name != "pool_index":
                assert torch.equal(from_bytes(codec.encode(x).to_bytes()).decode(), codec.encode(x).decode())
    assert refused >= len(WRONG) // 2


def test_a_window_given_as_one_number_is_told_what_is_expected() -> None:
    with raising(CodecError, "pool_index", "kernel=2"):
        get("pool_index", **{**POOL, "kernel": 2})


def test_numpy_numbers_are_numbers() -> None:
    assert get("linear", block=np.int64(8)) == get("linear", block=8)
    assert get("one_bit", block=np.int32(16)) == get("one_bit", block=16)
    assert get("static_tree", exponent_offset=np.int8(-3)) == get("static_tree", exponent_offset=-3)
    assert get("linear", scale=np.float32(0.5)) == get("linear", scale=0.5)


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_names_bytes_and_tensors_of_a_wrong_kind_are_refused(value: Any) -> None:
    for wants in (get, registry.needed, from_bytes, get("linear").decode):
        with pytest.raises(CodecError) as told:
            wants(value)
        assert is_readable(told.value)
    x, encoded = torch.zeros(3), get("linear").encode(torch.zeros(3))
    calls = [
        lambda: get("linear").encode(x, out=value),
        lambda: encoded.decode(value),
        lambda: get("one_bit").encode(x, residual=value),
    ]
    if not isinstance(value, torch.Tensor):
        calls += [lambda: get("linear").encode(value)]
    for call in calls if value is not None else calls[-1:]:
        with pytest.raises(CodecError) as told:
            call()
        assert is_readable(told.value)


def test_a_seed_is_a_whole_number() -> None:
    codec, x = get("linear"), torch.linspace(-1, 1, 9)
    for value in WRONG:
        try:
            codec.encode(x, seed=value)
        except CodecError as error:
            assert is_readable(error)
    assert torch.equal(codec.encode(x, seed=np.int64(5)).payload, codec.encode(x, seed=5).payload)
    with raising(CodecError, "seed=1.5"):
        codec.encode(x, seed=1.5)  # type: ignore[arg-type]


def test_what_lossy_is_given_is_held_to_the_same() -> None:
    for value in WRONG:
        for option in ("codec", "codec_block", "codec_seed", "codec_exempt", "nonsense"):
            try:
                Options(**{option: value})
            except (CodecError, InputError) as error:
                assert is_readable(error), (option, value)
