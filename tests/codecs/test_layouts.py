"""Any tensor goes in: however it lies in memory, of whatever size and dtype; and out= takes what comes out."""

from __future__ import annotations

import pytest
import torch

from shoal.codecs import Codec, get
from shoal.codecs.memory_order import dims_by_stride, same_places, strides_in_order
from shoal.errors import CodecError
from tests.codecs.every_codec import FLOAT_CODECS, name_of
from tests.raising import raising

every_codec = pytest.mark.parametrize("codec", [*FLOAT_CODECS, get("sign_mask")], ids=name_of)

IMAGES = torch.arange(120.0).view(2, 3, 4, 5) - 50
LAYOUTS = {
    "contiguous": IMAGES,
    "channels_last": IMAGES.to(memory_format=torch.channels_last),
    "transposed": IMAGES.transpose(0, 2),
    "permuted": IMAGES.permute(3, 1, 0, 2),
    "one channel, channels_last": IMAGES[:, :1]
    .clone(memory_format=torch.contiguous_format)
    .to(memory_format=torch.channels_last),
    "3-D, channels_last": IMAGES[:, :, None].to(memory_format=torch.channels_last_3d),
    "a part": IMAGES.flatten()[7:49].view(6, 7),
    "0-d": torch.tensor(-2.5),
    "empty": torch.empty(3, 0, 2),
}
WITH_GAPS = {
    "every other": IMAGES[..., ::2],
    "some channels": IMAGES.to(memory_format=torch.channels_last)[:, :2],
    "expanded": torch.tensor([1.0, -2.0]).expand(3, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_codec
def test_a_tensor_without_gaps_is_encoded_as_it_lies_and_keeps_its_strides(codec: Codec, layout: str) -> None:
    x = LAYOUTS[layout]
    encoded = codec.encode(x)
    in_memory = x.as_strided((x.numel(),), (1,))
    assert torch.equal(encoded.payload, codec.encode(in_memory).payload)
    decoded = encoded.decode()
    assert (decoded.shape, decoded.stride()) == (x.shape, x.stride())
    assert torch.equal(decoded.as_strided((x.numel(),), (1,)), codec.encode(in_memory).decode())


@pytest.mark.parametrize("layout", WITH_GAPS)
@every_codec
def test_one_with_gaps_is_encoded_as_if_it_were_contiguous(codec: Codec, layout: str) -> None:
    x = WITH_GAPS[layout]
    encoded = codec.encode(x)
    assert torch.equal(encoded.payload, codec.encode(x.contiguous()).payload)
    decoded = encoded.decode()
    assert decoded.shape == x.shape
    assert decoded.is_contiguous()


@every_codec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_comes_back(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.randn(3, 70).to(dtype)
    encoded = codec.encode(x)
    assert torch.equal(encoded.payload, codec.encode(x.float()).payload)
    if codec.name == "sign_mask":
        return
    assert encoded.decode().dtype == dtype
    assert torch.equal(encoded.decode(), codec.encode(x.float()).decode().to(dtype))


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_cast_to_the_tensors_own_dtype_loses_nothing(codec: str, dtype: torch.dtype) -> None:
    x = torch.randn(100).to(dtype)
    assert torch.equal(get(codec).encode(x).decode(), x)


@every_codec
def test_nothing_that_is_given_is_changed_and_no_gradient_is_followed(codec: Codec) -> None:
    x = torch.randn(30, requires_grad=True)
    before = x.detach().clone()
    encoded = codec.encode(x)
    payload = encoded.payload.clone()
    decoded = encoded.decode()
    assert not decoded.requires_grad
    assert torch.equal(x, before)
    assert torch.equal(encoded.payload, payload)


@every_codec
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_the_payload_may_be_the_callers_wherever_it_begins(codec: Codec, offset: int) -> None:
    x = torch.randn(2, 21)
    buffer = torch.full((codec.bytes_for(x.shape) + offset + 3,), 0xA5, dtype=torch.uint8)
    out = buffer[offset : offset + codec.bytes_for(x.shape)]
    encoded = codec.encode(x, out=out)
    assert encoded.payload.data_ptr() == out.data_ptr()
    assert torch.equal(out, codec.encode(x).payload)
    assert (buffer[:offset] == 0xA5).all()
    assert (buffer[offset + len(out) :] == 0xA5).all()
    assert torch.equal(encoded.decode(), codec.encode(x).decode())


@every_codec
def test_so_may_what_is_decoded_into_whatever_its_strides(codec: Codec) -> None:
    encoded = codec.encode(IMAGES)
    expected = encoded.decode()
    for out in (
        torch.empty_like(expected),
        torch.empty_like(expected, memory_format=torch.channels_last),
        torch.zeros(2, 3, 4, 10, dtype=expected.dtype)[..., ::2],
    ):
        assert codec.decode(encoded, out=out) is out
        assert torch.equal(out, expected)


@every_codec
def test_an_out_of_another_kind_is_refused(codec: Codec) -> None:
    encoded = codec.encode(IMAGES)
    for out in (
        torch.empty(120),
        torch.empty(2, 3, 4, 5, dtype=torch.float64),
        torch.empty(IMAGES.shape, device="meta"),
    ):
        with pytest.raises(CodecError):
            codec.decode(encoded, out=out)
    size = codec.bytes_for(IMAGES.shape)
    for payload, said in (
        (torch.empty(size + 1, dtype=torch.uint8), f"got {size + 1} bytes of payload, expected {size}"),
        (torch.empty(size), "got a payload of torch.float32"),
        (torch.empty(2 * size, dtype=torch.uint8)[::2], "expected dense uint8"),
        (torch.empty(size, dtype=torch.uint8, device="meta"), "got out on meta, expected cpu"),
    ):
        with pytest.raises(CodecError) as told:
            codec.encode(IMAGES, out=payload)
        assert said in str(told.value)


@every_codec
@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.float64), torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex64)],
    ids=["float64", "sparse", "complex"],
)
def test_a_tensor_of_another_kind_is_refused(codec: Codec, tensor: torch.Tensor) -> None:
    with raising(CodecError, "float32"):
        codec.encode(tensor)


def test_another_codec_does_not_decode_it() -> None:
    encoded = get("linear").encode(torch.ones(9))
    for other in (get("dynamic_tree"), get("linear", block=8), get("linear", scale=1.0)):
        with raising(CodecError, "linear(block=4096)"):
            other.decode(encoded)
    assert torch.equal(get("linear").decode(encoded), torch.ones(9))


def test_an_encoded_tensor_goes_to_a_device() -> None:
    encoded = get("bf16").encode(torch.ones(3)).to("meta")
    assert encoded.payload.device.type == "meta"
    assert encoded.decode().device.type == "meta"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_follow_from_the_order_of_dimensions(layout: str) -> None:
    x = LAYOUTS[layout]
    strides = strides_in_order(x.shape, dims_by_stride(x))
    assert same_places(x.shape, strides, x.stride())
    assert torch.empty_strided(x.shape, strides).untyped_storage().nbytes() == 4 * x.numel()
