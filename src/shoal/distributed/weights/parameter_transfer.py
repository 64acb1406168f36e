"""One parameter's transfers between host and device: its master, packed bytes and gradient in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shoal.codecs.codec import Codec, Encoded
from shoal.codecs.memory_order import same_places, without_gaps
from shoal.core.sizes import in_pages
from shoal.errors import InputError
from shoal.offload.links.host import HostSlab
from shoal.offload.links.open_link import OpenLink
from shoal.offload.links.slab import Copy


@dataclass(eq=False)
class ParameterTransfer:
    """Where one parameter lies on both sides, and what of it is under way.

    Attributes:
        name: of the parameter in the model.
        parameter: on the device, only in its storage.
        packs: whether its weights and gradients may be encoded.
        packed_bytes: of its encoded weights, at most.
        used_early: something reads it before, or without, its module being called.
    """

    name: str
    parameter: torch.nn.Parameter
    packs: bool
    packed_bytes: int
    used_early: bool = True
    master: torch.nn.Parameter = field(init=False, repr=False)
    _slab: HostSlab = field(init=False, repr=False)
    _offsets: tuple[int, int, int] = field(init=False, repr=False)
    _arriving: Copy | None = field(default=None, repr=False)
    _encoded: Encoded | None = field(default=None, repr=False)
    _last_read: Copy | None = field(default=None, repr=False)
    _gradient: tuple[Copy, Encoded | None] | None = field(default=None, repr=False)

    @property
    def raw_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()

    @property
    def host_bytes(self) -> int:
        """What it takes on the host, whole pages: master, packed weights, gradient."""
        return 2 * in_pages(max(1, self.raw_bytes)) + in_pages(max(1, self.packed_bytes))

    def settle_in(self, slab: HostSlab, offset: int) -> None:
        """Take this place in host memory and copy the weights there."""
        each = in_pages(max(1, self.raw_bytes))
        self._slab, self._offsets = slab, (offset, offset + each, offset + 2 * each)
        like = self.parameter.detach()
        self.master = torch.nn.Parameter(self._view(self._offsets[0]), requires_grad=like.requires_grad)
        self.master.detach().copy_(like)

    def send(self, link: OpenLink, codec: Codec | None) -> int:
        """Start to send the weights; the bytes sent. On the host they are read until `settle`."""
        if not self.raw_bytes:
            return 0
        if codec is None:
            storage, offset = self.parameter.untyped_storage(), self._offsets[0]
        else:
            nbytes, offset = codec.bytes_for(self.parameter.shape), self._offsets[2]
            here = codec.encode(self.master, out=self._slab.bytes[offset : offset + nbytes])
            staging = torch.empty(nbytes, dtype=torch.uint8, device=self.parameter.device)
            self._encoded = Encoded(here.codec, here.dtype, here.shape, here.stride, staging)
            storage = staging.untyped_storage()
        torch.autograd.graph.increment_version(self.parameter)  # a backward pass of the old weights must fail
        self._arriving = self._last_read = link.fetch(storage, self._slab, offset)
        return self._arriving.nbytes

    @property
    def is_under_way(self) -> bool:
        return self._arriving is not None

    def arrive(self) -> float:
        """Have the computation wait for the weights; the seconds it stood still so far."""
        copy, self._arriving = self._arriving, None
        if copy is None:
            return 0.0
        copy.wait()
        return copy.stalled_seconds() if self.parameter.device.type == "cpu" else 0.0

    def unpack(self) -> None:
        """Decode what has arrived into the parameter."""
        encoded, self._encoded = self._encoded, None
        if encoded is not None:
            encoded.decode(out=self.parameter.data)

    def settle(self) -> None:
        """Return when nothing reads the master any more."""
        if self._last_read is not None:
            self._last_read.settle()
            self._last_read = None

    def send_gradient(self, link: OpenLink, codec: Codec | None) -> int:
        """Start to send the gradient to the host and take it off the parameter; the bytes sent."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None or not self.raw_bytes:
            return 0
        if gradient.layout != torch.strided or gradient.dtype != torch.float32:
            got = f"{gradient.layout} {gradient.dtype}"
            raise InputError(f"{self.name}: got a gradient of {got}, expected dense float32; set sparse=False")
        if not same_places(gradient.shape, gradient.stride(), self.parameter.stride()) or not _is_alone(gradient):
            gradient = torch.empty_like(self.parameter).copy_(gradient)
        encoded = None if codec is None else codec.encode(gradient)
        storage = (gradient if encoded is None else encoded.payload).untyped_storage()
        copy = link.offload(storage, self._slab, self._offsets[1])
        self._gradient = copy, encoded
        return copy.nbytes

    def gradient_arrives(self) -> None:
        """Wait for the gradient and add it to the master's."""
        if self._gradient is None:
            return
        (copy, encoded), self._gradient = self._gradient, None
        copy.settle()
        copy.wait()
        if encoded is None:
            found = self._view(self._offsets[1])
        else:
            payload = self._slab.bytes[self._offsets[1] : self._offsets[1] + encoded.nbytes]
            found = Encoded(encoded.codec, encoded.dtype, encoded.shape, encoded.stride, payload).decode()
        if self.master.grad is None:
            self.master.grad = found if encoded is not None else found.clone()
        else:
            self.master.grad.add_(found)

    def forget(self) -> None:
        """What is under way is not wanted any more: a backward pass that failed."""
        if self._gradient is not None:
            copy, _ = self._gradient
            self._gradient = None
            copy.abandon()
            copy.settle()

    def _view(self, offset: int) -> torch.Tensor:
        whole = self._slab.bytes[offset : offset + self.raw_bytes].view(torch.float32)
        return whole.as_strided(self.parameter.shape, self.parameter.stride(), whole.storage_offset())


def own_storage(parameter: torch.nn.Parameter) -> None:
    """Let a parameter be only in its storage, dense; its values stay, and its strides if they can."""
    if not _is_alone(parameter.data):
        parameter.data = without_gaps(parameter.data).clone(memory_format=torch.preserve_format)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether a copy of the whole storage is a copy of the tensor."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and without_gaps(tensor) is tensor
