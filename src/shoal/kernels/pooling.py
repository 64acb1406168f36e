"""Max pooling that saves one byte per output.

Where its input comes from a ReLU, the byte also holds the ReLU's mask: its gradient passes where the maximum is
not zero.

One sweep each way: native for float32 and bfloat16 on the CPU (`csrc/max_pool.cpp`), of which gradients have the bits
of PyTorch's kernels: in bfloat16 sums are rounded after each window. On CUDA one Triton kernel each, whose sums are
float32 until they are stored, as those of PyTorch's are there. Neither allocates anything but its results.

The reference is PyTorch's own kernels, a few images at a time, so that no int64 index of the whole batch exists; the
same bits.

To the kernels a tensor is `planes` of pixels of `pixel` values: one in channels_last has an image a plane and its
channels in a pixel, a contiguous one has a channel a plane.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.codecs import pool_index
from shoal.codecs.launch import threads_for
from shoal.errors import InputError
from shoal.kernels.memory_format import channels_last_format, suggested_memory_format
from shoal.kernels.relu import zeroed
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register
from shoal.lowlevel.native import fields, has, run_native
from shoal.lowlevel.torch_state import on_device
from shoal.lowlevel.triton_launch import Launch, Launches, TritonKernels

_aten = torch.ops.aten
_PIECE_ELEMS = 1 << 16  # outputs in a piece: each int64 scratch is 512 KiB
_DEVICE_PIECE_ELEMS = 1 << 22  # where every piece costs launches of kernels: 32 MiB
Options = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], bool]  # kernel to dilation, ceil_mode
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_TRITON_DTYPES = (*_NATIVE_DTYPES, torch.float16)
_MIN_ELEMS = 1 << 14  # of a thread that is worth waking
_COPIED_ELEMS = 1 << 16  # of a copy in the layout that kernels read: 256 KiB
_MOST_BLOCK = 512
_MAX_PLANE_ELEMS = 1 << 30  # Triton's kernels count those of a plane in 32 bits
_launches = Launches()


def forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Max pooling of (N, C, ...): its result, and for each output the place of the winner within its window, uint8.

    `rest`: kernel, stride, padding, dilation and ceil_mode of the pooling, and whether a ReLU comes before it: a window
    whose maximum is zero then has none.
    """
    *options, after_relu = rest
    *window, ceil_mode = options
    sizes = [_outputs(*of_axis, ceil_mode=ceil_mode) for of_axis in zip(x.shape[2:], *window, strict=True)]
    layout = suggested_memory_format(x)
    implementation = choose(_OP, layout, window[-1], x)
    result: tuple[Tensor, Tensor] = implementation.forward(x, sizes, layout, options, after_relu)
    return result


def backward(grad: Tensor, codes: Tensor, input_shape: Sequence[int], channels_last: bool, *rest: Any) -> Tensor:
    """Max pooling's backward from one-byte codes and the shape of its input, and the ReLU's before it if there is one.

    `rest`: as of `forward`.
    """
    *options, after_relu = rest
    layout = channels_last_format(len(input_shape)) if channels_last else torch.contiguous_format
    result = torch.empty(tuple(input_shape), dtype=grad.dtype, device=grad.device, memory_format=layout)
    if result.numel():
        choose(_OP, layout, options[3], grad, codes).backward(grad, codes, result, options, after_relu)
    return result


class _PoolingByPyTorch:
    """PyTorch's kernels, whose int64 indices exist for a piece at a time."""

    @staticmethod
    def forward(
        x: Tensor, sizes: Sequence[int], layout: torch.memory_format, options: Options, after_relu: bool
    ) -> tuple[Tensor, Tensor]:
        pool = _aten.max_pool2d_with_indices if len(sizes) == 2 else _aten.max_pool3d_with_indices
        windows = pool_index.Windows(x.shape, sizes, *options[:4], device=x.device)

        def of(some: Tensor) -> tuple[Tensor, Tensor]:
            # The library's form that writes into given tensors takes five times as long.
            pooled, indices = pool(some, *options)
            codes = windows.encode(indices)
            if after_relu:
                none = pooled == 0
                if none.is_cpu:  # where filling by a mask takes ten times as long; NO_PLACE has all bits
                    codes.bitwise_or_(none.view(torch.uint8).neg_())
                else:
                    codes.masked_fill_(none, pool_index.NO_PLACE)
            return pooled, codes

        shape = (*x.shape[:2], *sizes)
        pieces = _pieces(shape, x.device)
        if len(pieces) == 1:
            return of(x)
        pooled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
        codes = torch.empty_like(pooled, dtype=torch.uint8)
        for some in pieces:
            pooled[some], codes[some] = of(x[some])
        return pooled, codes

    @staticmethod
    def backward(grad: Tensor, codes: Tensor, result: Tensor, options: Options, after_relu: bool) -> None:
        two = result.dim() == 4
        packet = _aten.max_pool2d_with_indices_backward if two else _aten.max_pool3d_with_indices_backward
        windows = pool_index.Windows(result.shape, codes.shape[2:], *options[:4], device=codes.device)
        for some in _pieces(codes.shape, codes.device):
            indices = windows.decode(codes[some])
            given = grad[some]
            if after_relu:
                none = codes[some] == pool_index.NO_PLACE
                if given.is_cpu:  # from a contiguous gradient, as of `masked_fill`, the kernel copies its result back
                    given = zeroed(given, none)
                else:
                    given = given.masked_fill(none, 0)
                del none
            # The kernel reads only the sizes of the pool's input, so the result stands in for it.
            part = result[some]
            packet.grad_input(given, part, *options, indices, grad_input=part)


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil_mode: bool) -> int:
    """How many windows there are along an axis; rounding up makes none that begins in the padding after the input."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + stride - 1 if ceil_mode else room) // stride + 1
    return count - (ceil_mode and (count - 1) * stride >= size + padding)


def _pieces(outputs: Sequence[int], device: torch.device) -> list[slice]:
    """Some images each; at least one piece, also of no images."""
    piece_elems = _PIECE_ELEMS if device.type == "cpu" else _DEVICE_PIECE_ELEMS
    images = max(1, piece_elems * outputs[0] // max(1, prod(outputs)))
    return [slice(start, start + images) for start in range(0, max(1, outputs[0]), images)]


class _Geometry(NamedTuple):
    """Sizes as those of a volume: a dimension that is missing has one place."""

    planes: int
    pixel: int
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    place_step: tuple[int, ...]


@lru_cache(maxsize=256)
def _geometry(
    shape: torch.Size,
    outputs: torch.Size,
    channels_last: bool,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> _Geometry:
    ones, zeros = (1,) * (3 - len(kernel)), (0,) * (3 - len(kernel))
    return _Geometry(
        planes=shape[0] if channels_last else shape[0] * shape[1],
        pixel=shape[1] if channels_last else 1,
        in_size=(*ones, *shape[2:]),
        out_size=(*ones, *outputs[2:]),
        kernel=(*ones, *kernel),
        stride=(*ones, *stride),
        padding=(*zeros, *padding),
        place_step=(*zeros, *pool_index.steps(shape, kernel, [1] * len(kernel))),
    )


def _geometry_of(x: Tensor, codes: Tensor, layout: torch.memory_format, options: Options) -> _Geometry:
    windows = (tuple(option) for option in options[:3])
    return _geometry(x.shape, codes.shape, layout is not torch.contiguous_format, *windows)


class _PoolingSweepsCall(ctypes.Structure):
    """ShoalMaxPool of csrc/shoal_native.h."""

    _fields_ = fields(
        "int64 planes pixel, int64*3 in_size out_size kernel stride padding place_step,"
        "int32 bfloat16 after_relu threads level, pointer x pooled places grad grad_x"
    )


@lru_cache(maxsize=256)
def _call(geometry: _Geometry) -> _PoolingSweepsCall:
    """A call of these sizes, to be copied: filling in arrays takes longer than a small pooling."""
    return _PoolingSweepsCall(*geometry)


def _call_of(x: Tensor, codes: Tensor, geometry: _Geometry, after_relu: bool) -> _PoolingSweepsCall:
    """What both have in common; `x` is what is pooled, or its gradient."""
    call = _PoolingSweepsCall.from_buffer_copy(_call(geometry))
    call.bfloat16, call.after_relu = x.dtype == torch.bfloat16, after_relu
    call.threads, call.level = threads_for(x.numel(), _MIN_ELEMS), level_number()
    call.places = codes.data_ptr()
    return call


def _lie_so(layout: torch.memory_format, tensors: Sequence[Tensor]) -> bool:
    return all(one.is_contiguous(memory_format=layout) for one in tensors)


def _has_gaps(dilation: Sequence[int]) -> bool:
    """Whether windows have gaps: one may then lie in the padding altogether."""
    return any(step != 1 for step in dilation)


def _images(layout: torch.memory_format, *tensors: Tensor) -> list[slice]:
    """Images to pool at once: all, or a few where tensors of another layout are copied first."""
    first, images = tensors[0], max(1, tensors[0].shape[0])
    at_once = images if _lie_so(layout, tensors) else max(1, _COPIED_ELEMS * images // max(1, first.numel()))
    return [slice(start, start + at_once) for start in range(0, images, at_once)]


class _PoolingSweepsNative:
    """`csrc/max_pool.cpp`."""

    @staticmethod
    def applies(layout: torch.memory_format, dilation: Sequence[int], values: Tensor, *codes: Tensor) -> bool:
        """Whether it reads such values here; those of another layout are copied, a few images at a time."""
        return values.is_cpu and values.dtype in _NATIVE_DTYPES and not _has_gaps(dilation) and has("shoal_max_pool")

    @staticmethod
    def forward(
        x: Tensor, sizes: Sequence[int], layout: torch.memory_format, options: Options, after_relu: bool
    ) -> tuple[Tensor, Tensor]:
        pooled = torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, memory_format=layout)
        codes = torch.empty_like(pooled, dtype=torch.uint8)
        for some in _images(layout, x):
            given = x[some].contiguous(memory_format=layout)
            call = _call_of(given, codes[some], _geometry_of(given, codes[some], layout, options), after_relu)
            call.x, call.pooled = given.data_ptr(), pooled[some].data_ptr()
            run_native("shoal_max_pool", call)
        return pooled, codes

    @staticmethod
    def backward(grad: Tensor, codes: Tensor, result: Tensor, options: Options, after_relu: bool) -> None:
        layout = suggested_memory_format(result)
        for some in _images(layout, grad, codes):
            given, read = (one[some].contiguous(memory_format=layout) for one in (grad, codes))
            call = _call_of(result[some], read, _geometry_of(result[some], read, layout, options), after_relu)
            call.grad, call.grad_x = given.data_ptr(), result[some].data_ptr()
            run_native("shoal_max_pool_backward", call)


class _PoolingSweepsTriton:
    """`pooling_triton_kernels`."""

    @staticmethod
    def applies(layout: torch.memory_format, dilation: Sequence[int], values: Tensor, *codes: Tensor) -> bool:
        """Whether it reads such values and codes here."""
        return (
            values.dtype in _TRITON_DTYPES
            and values.numel() < _MAX_PLANE_ELEMS * values.shape[0]
            and not _has_gaps(dilation)
            and _lie_so(layout, (values, *codes))
            and TRITON_KERNELS.run_on(values.device)
        )

    @staticmethod
    def forward(
        x: Tensor, sizes: Sequence[int], layout: torch.memory_format, options: Options, after_relu: bool
    ) -> tuple[Tensor, Tensor]:
        pooled = torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, device=x.device, memory_format=layout)
        codes = torch.empty_like(pooled, dtype=torch.uint8)
        geometry = _geometry_of(x, codes, layout, options)
        _launch("winners", (x, pooled, codes), geometry, geometry.out_size, after_relu)
        return pooled, codes

    @staticmethod
    def backward(grad: Tensor, codes: Tensor, result: Tensor, options: Options, after_relu: bool) -> None:
        geometry = _geometry_of(result, codes, suggested_memory_format(result), options)
        _launch("gradients", (grad, codes, result), geometry, geometry.in_size, after_relu)


def _launch(name: str, tensors: Sequence[Tensor], geometry: _Geometry, size: Sequence[int], after_relu: bool) -> None:
    """Run a kernel that writes planes of this size."""
    written = prod(size) * geometry.pixel
    if not written * geometry.planes:
        return

    def made() -> Launch:
        block = min(_MOST_BLOCK, 1 << (written - 1).bit_length())
        blocks = -(-written // block)
        numbers = (
            blocks,
            prod(geometry.out_size) * geometry.pixel,
            prod(geometry.in_size) * geometry.pixel,
            geometry.pixel,
            *geometry.out_size,
            *geometry.in_size,
            *geometry.place_step[:2],
            *geometry.kernel,
            *geometry.stride,
            *geometry.padding,
            after_relu,
            block,
        )
        kernel = getattr(TRITON_KERNELS.found(), name)
        return Launch(kernel, (blocks * geometry.planes,), lambda *tensors: (*tensors, *numbers))

    device = tensors[0].device
    with on_device(device):
        key = name, device, geometry, after_relu, *(tensor.dtype for tensor in tensors)
        _launches.run(key, tuple(tensors), made)


def _try_on(device: torch.device) -> None:
    x = torch.ones((1, 1, 2, 2), device=device)
    TRITON.forward(x, [1, 1], torch.contiguous_format, ([2, 2], [2, 2], [0, 0], [1, 1], False), True)


TRITON_KERNELS = TritonKernels(
    "shoal.kernels.pooling_triton_kernels", "PyTorch's own kernels in pieces", InputError, _try_on
)
NATIVE, TRITON = _PoolingSweepsNative(), _PoolingSweepsTriton()
_OP: DispatchedOp[Any] = register(
    "max_pool",
    _PoolingByPyTorch,
    Implementation("triton", TRITON, TRITON.applies),
    Implementation("native", NATIVE, NATIVE.applies),
)
