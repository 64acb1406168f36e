"""What docs/codecs.md says of sheets and bytes is so."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

import pytest
import torch

from shoal import codecs
from shoal.codecs import Codec, Properties
from tests.codecs.every_codec import NEEDED

TEXT = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
EXAMPLES = [
    codecs.get("dynamic_tree").encode(torch.tensor([[0.5, -1.0], [0.0, 0.25]])),
    codecs.get("static_tree", block=2, exponent_offset=1).encode(
        torch.tensor([-1.0, 1.0, 0.0, 2.0]).bfloat16().as_strided((1, 2, 1, 2), (4, 1, 4, 2))
    ),
    codecs.get("one_bit", block=None).encode(torch.tensor([1.0, -4.0, 2.0])),
    codecs.get("truncate3").encode(torch.tensor([1.1, -2.0])),
    codecs.get("sign_mask").encode(torch.tensor([1.0, -4.0, 2.0])),
]


def golden() -> list[bytes]:
    """The bytes of each example: what stands before two spaces or more and a word."""
    blocks = re.findall(r"```\n(53 48 .*?)```", TEXT, re.DOTALL)
    return [
        bytes.fromhex(" ".join(re.match(r"(?:[0-9a-f]{2} {0,2}\b)+", line).group() for line in block.splitlines()))  # type: ignore[union-attr]
        for block in blocks
    ]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_bytes_of_an_example_are_written_and_read(number: int) -> None:
    encoded = EXAMPLES[number]
    assert encoded.to_bytes() == golden()[number]
    read = codecs.from_bytes(golden()[number])
    assert read.codec == encoded.codec
    assert (read.dtype, read.shape, read.stride) == (encoded.dtype, encoded.shape, encoded.stride)
    assert torch.equal(read.decode(), encoded.decode())


def test_every_example_has_its_bytes() -> None:
    assert len(golden()) == len(EXAMPLES)


def row(codec: Codec) -> str:
    sheet: Properties = codec.properties
    cells = (
        f"`{codec.name}`",
        str(sheet.bits_per_value),
        "lossless" if sheet.lossless else share(sheet.relative_error),
        "" if sheet.lossless else share(sheet.absolute_error),
        *("yes" if said else "no" for said in (sheet.odd, sheet.zero, sheet.idempotent)),
        sheet.nan,
        sheet.infinity,
        "no" if sheet.overflow == inf else f"{sheet.overflow:.5g}",
    )
    return f"| {' | '.join(cells)} |"


def share(error: float | None) -> str:
    return "no bound" if error is None else f"{error:.2%}" if error > 1e-3 else f"{error:.4%}"


@pytest.mark.parametrize("name", codecs.names())
def test_the_sheet_of_a_codec_stands_there(name: str) -> None:
    assert row(codecs.get(name, **NEEDED.get(name, {}))) in TEXT.splitlines()


@pytest.mark.parametrize("name", codecs.names())
def test_the_number_of_a_codec_stands_there(name: str) -> None:
    number = codecs.get(name, **NEEDED.get(name, {})).wire_id
    line = next(line for line in TEXT.splitlines() if re.match(r"\| [\d, .]+\|", line) and f"`{name}`" in line)
    first, *_, last = re.findall(r"\d+", line.split("|")[1] * 2)
    assert int(first) <= number <= int(last)
