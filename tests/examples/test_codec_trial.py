"""A trial tells a codec's bytes and errors exactly, and its speeds from what was timed."""

from __future__ import annotations

import pytest
import torch

import examples.try_codecs as module
from examples.try_codecs import Trial, columns, of_values, try_codec, tryable_names
from shoal.codecs import get
from shoal.errors import InputError
from tests.codecs.every_codec import FLOAT_CODECS
from tests.raising import raising


@pytest.fixture(autouse=True)
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2e-9, 6e-9] * 100)

    def fastest_seconds(run: object, device: object) -> float:
        return next(seconds)

    monkeypatch.setattr(module, "fastest_seconds", fastest_seconds)


@pytest.mark.parametrize("name", tryable_names())
def test_errors_are_those_of_a_round_trip_in_float64(name: str) -> None:
    x = torch.cat([torch.randn(300), torch.zeros(5)])
    codec = of_values(get(name))
    came = codec.decode(codec.encode(x))
    tried = try_codec(codec, x)
    errors = [abs(y - value) for value, y in zip(x.tolist(), came.tolist(), strict=True)]
    relative = [error / abs(value) for error, value in zip(errors, x.tolist(), strict=True) if value]
    assert tried.largest_error == max(errors)
    assert tried.mean_error == pytest.approx(sum(errors) / 305, rel=1e-12)
    assert tried.largest_relative_error == max(relative)
    assert tried.mean_relative_error == pytest.approx(sum(relative) / 300, rel=1e-12)
    assert (tried.raw_bytes, tried.payload_bytes) == (1220, codec.bytes_for((305,)))
    assert tried.lost == 0


def test_what_is_lost_is_counted_and_has_no_error() -> None:
    x = torch.tensor([1.0, 70000.0, float("nan"), float("inf"), -1.0])
    tried = try_codec(of_values(get("fp16")), x)
    assert (tried.lost, tried.largest_error) == (1, 0.0)
    tried = try_codec(of_values(get("linear")), x)
    assert (tried.lost, tried.largest_error, tried.mean_relative_error) == (3, 0.0, 0.0)


def test_speeds_are_of_float32_and_break_even_is_of_the_bytes_saved() -> None:
    tried = try_codec(of_values(get("bf16")), torch.ones(4))
    assert (tried.encode_gbps, tried.decode_gbps) == pytest.approx((8.0, 16 / 6))
    assert tried.break_even_gbps == pytest.approx(8 / 8)
    assert tried.ratio == 2


def test_a_table_has_a_row_a_codec_and_json_every_figure() -> None:
    tried = [try_codec(codec, torch.randn(50)) for codec in FLOAT_CODECS[:3]]
    made = columns(tried, "some")
    assert made.row_count == 3
    assert len(made.columns) == 11
    properties = {"ratio", "encode_gbps", "decode_gbps", "break_even_gbps"}
    figures = (set(Trial.__dataclass_fields__) | properties) - {"encode_seconds", "decode_seconds"}
    assert set(tried[0].to_json()) == figures


def test_codecs_of_no_values_are_left_out_and_refused() -> None:
    assert "sign_mask" not in tryable_names()
    assert "pool_index" not in tryable_names()
    assert len(tryable_names()) == 14
    with raising(InputError, "sign_mask"):
        of_values(get("sign_mask"))
