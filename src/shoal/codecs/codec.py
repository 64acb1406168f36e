"""What every codec is: tensor to bytes and back, with a stated error, `Properties` and exact sizes.

    codec = shoal.codecs.get("dynamic_tree")
    y = codec.decode(codec.encode(x))

All of a codec's state is its options: the same tensor gives the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, ClassVar

import torch

from shoal.codecs import wire
from shoal.codecs.memory_order import dims_by_stride, same_places, strides_without_gaps, without_gaps
from shoal.codecs.tables import Table
from shoal.errors import CodecError, brief


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What a codec guarantees; the tests check every codec against it.

    Attributes:
        bits_per_value: of the payload, without the scales of blocks.
        lossless: decoding gives what was encoded (`sign_mask`: whether it was > 0).
        zero: zero decodes to zero.
        odd: -x decodes to the negative of what x decodes to.
        monotone: of two values of one block, the greater never decodes to less. Not for stochastic rounding.
        idempotent: encoding what was decoded gives the same bytes.
        nan: what becomes of a NaN: "NaN"; "block": it and all of its block become NaN; "sign": what its sign says;
            "none": there is none.
        infinity: what becomes of an infinity: the same words, and "itself"; "side": it and all of its sign in its block
            become infinite.
        overflow: finite magnitudes from here on become infinite (NaN, where `infinity` is "NaN").
        relative_error: the greatest error as a share of the value, for values of a tenth of the block's scale or more
            (types without scales: for normal ones); None: there is no such bound.
        absolute_error: the greatest error as a share of the block's scale (types without scales: of the greatest
            magnitude). `Codec.error_bound` says it for each value.
    """

    bits_per_value: int
    lossless: bool = False
    zero: bool = True
    odd: bool = True
    monotone: bool = True
    idempotent: bool = True
    nan: str
    infinity: str
    overflow: float = inf
    relative_error: float | None
    absolute_error: float


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded tensor.

    Attributes:
        codec: that made it.
        dtype, shape, stride: of the tensor that decoding gives.
        payload: (bytes,) uint8 on the tensor's device.
    """

    codec: Codec
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    payload: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the payload: what it takes in memory and on a link."""
        return self.payload.numel()

    def to(self, device: torch.device | str) -> Encoded:
        """The same with its payload on `device`."""
        return replace(self, payload=self.payload.to(device))

    def to_bytes(self) -> bytes:
        """Header and payload, for a file: `shoal.codecs.from_bytes` reads them.

        >>> from shoal.codecs import from_bytes, get
        >>> data = get("bf16").encode(torch.tensor([1.0, 2.5])).to_bytes()
        >>> len(data), from_bytes(data).decode()
        (37, tensor([1.0000, 2.5000]))
        """
        order = dims_by_stride(torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta"))
        header = wire.PayloadHeader(self.codec.wire_id, self.dtype, self.shape, order, self.codec.wire_options())
        return wire.to_bytes(header, self.payload.cpu().numpy().tobytes())

    def decode(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """`codec.decode(self, out)`."""
        return self.codec.decode(self, out)


class Codec(ABC):
    """One data type with its options. Immutable; equal to another of the same type and options.

    Attributes:
        name: in the registry.
        wire_id: its number in the header.
        dtypes: of the tensors it encodes.
    """

    name: str
    wire_id: int
    dtypes: ClassVar[tuple[torch.dtype, ...]]

    @property
    def options(self) -> dict[str, Any]:
        """What constructs it: `get(codec.name, **codec.options)` equals it."""
        return {}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{option}={value!r}' for option, value in self.options.items())})"

    @property
    @abstractmethod
    def properties(self) -> Properties:
        """What it guarantees."""

    @abstractmethod
    def payload_bytes(self, elems: int) -> int:
        """Of a tensor of that many elements, exactly."""

    def bytes_for(self, shape: Sequence[int]) -> int:
        """Bytes of the payload of a tensor of this shape, exactly.

        >>> from shoal.codecs import get
        >>> get("dynamic_tree").bytes_for((8192,)), get("truncate3").bytes_for((10, 10))
        (8200, 300)
        """
        return self.payload_bytes(prod(shape))

    def encode(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> Encoded:
        """Encode a tensor of any shape.

        A dense (non-overlapping) tensor, such as a channels_last one, is encoded in memory order and decodes to its own
        strides; another decodes to a contiguous one. float16 and bfloat16 are computed in float32.

        Args:
            tensor: of one of `dtypes`.
            out: (bytes_for(tensor.shape),) uint8 on the tensor's device, dense: becomes the payload. None: a new one.

        Raises:
            CodecError: the tensor or `out` is not so.
        """
        dense, payload = self._ready(tensor, out)
        self._encode_dense(dense, payload)
        return self._encoded(dense, payload)

    def decode(self, encoded: Encoded, out: torch.Tensor | None = None) -> torch.Tensor:
        """What was encoded, up to the stated error.

        Args:
            encoded: by a codec equal to this one.
            out: of the encoded tensor's shape and dtype, on the payload's device: filled and returned, whatever its
                strides. None: a new one with the strides of the encoded one.

        Raises:
            CodecError: it was encoded by another codec, the payload has another length, or `out` is not so.
        """
        if not isinstance(encoded, Encoded):
            raise CodecError(f"{self.name}: got {brief(encoded)}, expected what encode() returned; decode that")
        if encoded.codec is not self and encoded.codec != self:
            raise CodecError(f"got a tensor encoded by {encoded.codec}, expected {self}; decode it with its own codec")
        payload = encoded.payload
        self._check_payload(payload, self.bytes_for(encoded.shape))
        if out is not None:
            _check_out(out, encoded)
            if not out.requires_grad and same_places(out.shape, out.stride(), encoded.stride):
                self._decode_dense(payload, out)
                return out
        made = torch.empty_strided(encoded.shape, encoded.stride, dtype=encoded.dtype, device=payload.device)
        self._decode_dense(payload, made)
        if out is None:
            return made
        with torch.no_grad():
            return out.copy_(made)

    def table(self) -> Table:
        """The 128 magnitudes of an 8-bit type.

        Raises:
            CodecError: the type has no table.
        """
        raise CodecError(f"{self.name} has no table; the 8-bit types have, such as dynamic_tree")

    def wire_options(self) -> bytes:
        """The options as the header holds them."""
        return b""

    def check_decoded(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """
        Raises:
            CodecError: no tensor that this codec encodes decodes to one of this dtype and shape.
        """
        if dtype not in self.dtypes:
            raise CodecError(f"{self.name}: got a header of {dtype}, which it never decodes to; encode it again")

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """The greatest absolute error of each decoded value, as float64 of the tensor's shape; 0 if lossless.

        Infinite where it decodes to NaN or an infinity.
        """
        return torch.zeros_like(tensor, dtype=torch.float64)

    @abstractmethod
    def _encode_dense(self, dense: torch.Tensor, payload: torch.Tensor) -> None:
        """Fill the payload from a dense tensor."""

    @abstractmethod
    def _decode_dense(self, payload: torch.Tensor, dense: torch.Tensor) -> None:
        """Fill a dense tensor from the payload."""

    def _ready(self, tensor: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor, dense, and the payload to fill."""
        for what, value in (("tensor", tensor), ("out", out)):
            if not isinstance(value, torch.Tensor) and not (what == "out" and value is None):
                raise CodecError(f"{self.name}: got {what}={brief(value)}, expected a torch.Tensor")
        if tensor.layout != torch.strided or tensor.dtype not in self.dtypes:
            got = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            raise CodecError(f"{self.name}: got {got}, expected a dense tensor of {expected}; convert it first")
        dense = without_gaps(tensor.detach() if tensor.requires_grad else tensor)
        size = self.bytes_for(tensor.shape)
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        self._check_payload(out, size)
        if out.device != tensor.device:
            raise CodecError(f"{self.name}: got out on {out.device}, expected {tensor.device}; allocate it there")
        return dense, out

    def _check_payload(self, payload: torch.Tensor, expected_bytes: int) -> None:
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            got = f"{payload.dtype} of shape {tuple(payload.shape)}"
            raise CodecError(f"{self.name}: got a payload of {got}, expected dense uint8 of one dimension; flatten it")
        if payload.numel() != expected_bytes:
            raise CodecError(
                f"{self.name}: got {payload.numel()} bytes of payload, expected {expected_bytes}; see bytes_for(shape)"
            )

    def _encoded(self, dense: torch.Tensor, payload: torch.Tensor) -> Encoded:
        stride = strides_without_gaps(dense.shape, dense.stride())
        return Encoded(self, dense.dtype, tuple(dense.shape), stride, payload)


def _check_out(out: torch.Tensor, encoded: Encoded) -> None:
    if not isinstance(out, torch.Tensor):
        raise CodecError(f"got out={brief(out)}, expected a torch.Tensor; leave it out")
    if out.shape != encoded.shape or out.dtype != encoded.dtype or out.device != encoded.payload.device:
        got = f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
        expected = f"{encoded.dtype} of shape {encoded.shape} on {encoded.payload.device}"
        raise CodecError(f"got out of {got}, expected {expected}; allocate one like that, or leave it out")
