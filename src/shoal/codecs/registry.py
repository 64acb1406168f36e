"""Every codec by its name and by its number in the header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from shoal.codecs import one_bit, pool_index, table_codec, wire
from shoal.codecs.casts import CastCodec
from shoal.codecs.codec import Codec, Encoded
from shoal.codecs.memory_order import strides_in_order
from shoal.codecs.sign_mask import SignMaskCodec
from shoal.codecs.tables import DYNAMIC_TREE, DYNAMIC_TREE_EVEN, LINEAR, MANTISSA, MANTISSA_LARGEST, STATIC_TREE, Table
from shoal.codecs.truncation import TruncateCodec
from shoal.errors import CodecError, brief


@dataclass(frozen=True)
class Kind:
    """How codecs of one name are made.

    Attributes:
        name: such as "dynamic_tree".
        wire_id: its number in the header, which never changes; from 1024 on they are for user-defined codecs.
        make: options to codec.
        options: the names of those options.
        read: `wire_options` to codec.
        needed: of the options, those without a default.
    """

    name: str
    wire_id: int
    make: Callable[..., Codec]
    options: tuple[str, ...]
    read: Callable[[bytes], Codec]
    needed: tuple[str, ...] = ()


_kinds: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Add a user-defined codec.

    Raises:
        CodecError: its name or number is taken.
    """
    if not isinstance(kind, Kind):
        raise CodecError(f"kind is a {type(kind).__name__}; expected a shoal.codecs.Kind")
    for other in _kinds.values():
        if kind.name == other.name or kind.wire_id == other.wire_id:
            raise CodecError(f"got {kind.name} as number {kind.wire_id}, but {other.name} is number {other.wire_id}")
    _kinds[kind.name] = kind


def names() -> tuple[str, ...]:
    """Of all codecs, in the order of their numbers.

    >>> names()[:3]
    ('dynamic_tree', 'dynamic_tree_even', 'static_tree')
    """
    return tuple(_kinds)


def needed(name: str) -> tuple[str, ...]:
    """The options that the codec of this name cannot do without.

    Raises:
        CodecError: there is none of this name.

    >>> needed("linear"), needed("pool_index")[:2]
    ((), ('input_shape', 'kernel'))
    """
    return _kind_of(name).needed


def get(name: str, **options: Any) -> Codec:
    """The codec of this name and these options.

    Args:
        name: one of `names()`.
        options: `block` (values that share a scale; None: all of the tensor) for the 8-bit types and one_bit; `scale`
            (of every block, instead of its greatest magnitude) for the 8-bit types; `exponent_offset` (the scale is
            10 to this power) for static_tree and mantissa; `input_shape`, `kernel`, `stride`, `padding` and
            `dilation`, all of them, for pool_index.

    Raises:
        CodecError: there is none, or it does not have such an option.

    >>> codec = get("dynamic_tree")
    >>> codec.decode(codec.encode(torch.tensor([[1.0, -0.5], [0.02, 0.0]])))
    tensor([[ 0.9914, -0.4930],
            [ 0.0198,  0.0000]])
    """
    kind = _kind_of(name)
    for option in options:
        if option not in kind.options:
            choices = ", ".join(kind.options) or "none"
            raise CodecError(f"{name}: got option {option!r}, expected one of: {choices}")
    missing = [option for option in kind.needed if option not in options]
    if missing:
        raise CodecError(f"{name}: got no {', '.join(missing)}, which it needs; give {missing[0]}=")
    return kind.make(**options)


def from_bytes(data: bytes | bytearray | memoryview) -> Encoded:
    """The encoded tensor of a file or message that `Encoded.to_bytes` wrote; its payload, a copy, is on the CPU.

    Raises:
        CodecError: the bytes are cut, damaged, of another version, or contradict themselves.
    """
    header, payload = wire.from_bytes(data)
    kind = next((kind for kind in _kinds.values() if kind.wire_id == header.codec), None)
    if kind is None:
        raise CodecError(f"got codec number {header.codec}, which nothing registered; register it, or update Shoal")
    codec = kind.read(header.options)
    codec.check_decoded(header.dtype, header.shape)
    expected = codec.bytes_for(header.shape)
    if len(payload) != expected:
        raise CodecError(
            f"{kind.name}: got {len(payload)} bytes of payload, expected {expected} for shape {header.shape}; "
            "encode it again"
        )
    values = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8) if len(payload) else torch.empty(0, dtype=torch.uint8)
    )
    stride = strides_in_order(header.shape, header.order)
    return Encoded(codec, header.dtype, header.shape, stride, values)


def _kind_of(name: str) -> Kind:
    kind = _kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        close = get_close_matches(name[:99], _kinds, n=1) if isinstance(name, str) else ()
        hint = f"did you mean {close[0]!r}?" if close else "choose one of those below"
        raise CodecError(f"unknown codec {brief(name)}: {hint}", details={"codecs": ", ".join(_kinds)})
    return kind


def _without_options(codec: Codec, options: bytes) -> Codec:
    if options:
        raise CodecError(f"{codec.name}: got {len(options)} bytes of options, expected none; encode it again")
    return codec


def _table(table: Table, wire_id: int, unit: float | None = None) -> Kind:
    options = ("block", "scale") if unit is None else ("block", "scale", "exponent_offset")
    make = partial(table_codec.TableCodec, table, wire_id, unit)
    return Kind(table.name, wire_id, make, options, partial(table_codec.read_options, table, wire_id, unit))


def _plain(codec: Codec) -> Kind:
    return Kind(codec.name, codec.wire_id, lambda: codec, (), partial(_without_options, codec))


for _kind in (
    _table(DYNAMIC_TREE, 1),
    _table(DYNAMIC_TREE_EVEN, 2),
    _table(STATIC_TREE, 3, unit=1.0),
    _table(MANTISSA, 4, unit=float(MANTISSA_LARGEST)),
    _table(LINEAR, 5),
    Kind("one_bit", 6, partial(one_bit.OneBitCodec, 6), ("block",), partial(one_bit.read_options, 6)),
    *(
        _plain(TruncateCodec(f"{verb}{width}", 6 + width + 3 * nearest, width, nearest))
        for nearest, verb in ((False, "truncate"), (True, "round"))
        for width in (1, 2, 3)
    ),
    _plain(CastCodec("bf16", 13, torch.bfloat16)),
    _plain(CastCodec("fp16", 14, torch.float16)),
    _plain(SignMaskCodec(15)),
    Kind(
        "pool_index",
        16,
        partial(pool_index.PoolIndexCodec, 16),
        pool_index.OPTIONS,
        partial(pool_index.read_options, 16),
        needed=pool_index.OPTIONS,
    ),
):
    register(_kind)
