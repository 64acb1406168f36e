"""What a forward pass changes in addition to what it returns, to begin it again."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

from shoal.kernels.generator import generator_state, set_generator_state
from shoal.memory.storage_bytes import dense_tensors, distinct_bytes


class Snapshot:
    """The buffers of a model, and the states of the generators that a forward pass may draw from.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module._buffers, name, buffer, buffer.shape, distinct_bytes([buffer]))
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for buffer in dense_tensors(list(model.buffers())):
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer.detach())
        self._buffers = [(buffers, [torch.empty_like(one) for one in buffers]) for buffers in alike.values()]
        for buffers, copies in self._buffers:
            torch._foreach_copy_(copies, buffers)  # every planned step of several graphs begins so: one launch for all
        devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
        self._is_on_host = not devices
        self._states = [(device, generator_state(device)) for device in (torch.device("cpu"), *devices)]
        self._others = numpy.random.get_state(), random.getstate()  # wav2vec 2.0 masks with NumPy's

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it takes of the model's device: the copies, and on the CPU the state of its generator."""
        states = [state for _, state in self._states] if self._is_on_host else []
        return [*(copy for _, copies in self._buffers for copy in copies), *states]

    def restore(self) -> None:
        """Put all back as it was, also buffers that have got other sizes, or have been replaced."""
        for owner, name, buffer, shape, nbytes in self._places:
            owner[name] = buffer
            if buffer.shape != shape:
                buffer.resize_(shape)
                buffer.untyped_storage().resize_(nbytes)  # which resize_() only makes larger
        for buffers, copies in self._buffers:
            torch._foreach_copy_(buffers, copies)
        for device, state in self._states:
            set_generator_state(device, state)
        numpy_state, state_of_python = self._others
        numpy.random.set_state(numpy_state)
        random.setstate(state_of_python)
