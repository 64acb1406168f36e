"""Encoding into given memory takes scratch that does not grow with the tensor, and no byte remains."""

from __future__ import annotations

import pytest
import torch

from shoal.codecs import Codec, get
from shoal.lowlevel.allocations import peak_bytes, record
from tests.codecs.every_codec import FLOAT_CODECS, name_of

MANY, MORE = 300_000, 600_000
MOST_SCRATCH_BYTES = 12 << 20
every_codec = pytest.mark.parametrize("codec", [*FLOAT_CODECS, get("sign_mask")], ids=name_of)


@pytest.fixture(autouse=True, params=["reference", ""])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", request.param)


def in_place(codec: Codec, elems: int) -> tuple[list[int], list[int]]:
    """What encoding and decoding into given memory allocates and releases."""
    x = torch.randn(elems)
    payload = torch.empty(codec.bytes_for((elems,)), dtype=torch.uint8)
    encoded, encoding = record(lambda: codec.encode(x, out=payload))
    out = codec.decode(encoded)
    return encoding, record(lambda: codec.decode(encoded, out=out))[1]


@every_codec
def test_scratch_does_not_grow_with_the_tensor(codec: Codec) -> None:
    blocks = 1 if getattr(codec, "block", None) is None else MORE // codec.block  # type: ignore[attr-defined]
    for few, more in zip(in_place(codec, MANY), in_place(codec, MORE), strict=True):
        assert sum(few) == sum(more) == 0
        # The greatest magnitudes of blocks are a tensor of their own for a while.
        assert peak_bytes(more) <= peak_bytes(few) + 16 * blocks
        assert peak_bytes(more) <= MOST_SCRATCH_BYTES


@every_codec
def test_the_payload_and_the_tensor_are_all_that_is_left(codec: Codec) -> None:
    x = torch.randn(MANY)
    encoded, changes = record(lambda: codec.encode(x))
    assert sum(changes) == encoded.nbytes == codec.bytes_for(x.shape)
    decoded, changes = record(encoded.decode)
    assert sum(changes) == decoded.nbytes
