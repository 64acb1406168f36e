"""Dettmers' data parallelism: 8 bits for the gradients that arrive, 32 for a rank's own (2016, section 2.1).

`shoal.distributed.compress_gradients` rounds twice, sends fewer bytes from three ranks on, and keeps all ranks' weights
equal to the bit. This is the paper's scheme, for comparison with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal import codecs
from shoal.distributed import Exchange
from shoal.distributed.comm.agreement import agree, fingerprint
from shoal.distributed.comm.traffic import Traffic, ring_all_reduce_bytes
from shoal.distributed.gradients.bucket_segments import ParameterGrad, add, cut, message_bytes, pack
from shoal.errors import InputError


class LocalExact:
    """Has DDP average gradients so: every rank sends all of its encoded gradients to every other, adds its own exactly.

    One rounding, and W - 1 bytes a value among W ranks, so that it saves nothing from 8 ranks on. The ranks' means
    differ within the codec's error (but for parameters of less than two dimensions, which are sent as they are), and so
    do their weights, until rank 0's are broadcast. Optimizer states are not. A collective call, once, before the first
    backward pass.

    Args:
        model: whose gradients are averaged; not with `DistributedDataParallel.join`.
        codec: the name of a codec of floats.
        broadcast_every: rank 0's weights are sent to all before the forward pass that follows so many steps; 0: never.
        timeout_seconds: for each exchange.

    Attributes:
        traffic: bytes that this rank put on the wire, of "gradients" and "weights"; each backward pass is a step.

    Raises:
        InputError: `broadcast_every` is negative.
        CodecError: there is no codec of this name.
        TransferError: ranks differ in model, codec or `broadcast_every`.

    Limits: a bucket is exchanged while the backward pass waits. After `close` the model cannot be trained further.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: str = "dynamic_tree",
        *,
        broadcast_every: int = 100,
        timeout_seconds: float = 600.0,
    ) -> None:
        if broadcast_every < 0:
            raise InputError(f"got broadcast_every={broadcast_every}, expected a number of steps, or 0 for never")
        self.traffic = Traffic()
        self._codec = codecs.get(codec)
        self._broadcast_every = broadcast_every
        self._broadcast_due = False
        self._group: Any = model.process_group
        self._parameters = list(model.module.parameters())
        self._exchange = Exchange(self._group, timeout_seconds=timeout_seconds)
        shapes = fingerprint(model.module.named_parameters())
        agree(self._exchange, "LocalExact", codec=self._codec, broadcast_every=broadcast_every, model=shapes)
        # DDP checks a hook's annotations; this one has none.
        model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        self._handle = model.register_forward_pre_hook(self._broadcast)

    def close(self) -> None:
        """Free the process group. A collective call."""
        self._handle.remove()
        self._exchange.close()

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The bucket's mean, in its place."""
        buffer, exchange = bucket.buffer(), self._exchange
        names = map(str, range(len(bucket.parameters())))
        (segments,) = cut(list(map(ParameterGrad.of, names, bucket.parameters())), 1)
        values = buffer.float()
        message = torch.empty(message_bytes(segments, self._codec), dtype=torch.uint8, device=buffer.device)
        pack(values, segments, self._codec, message)
        before = exchange.sent_bytes
        what = f"gradients of bucket {bucket.index()}"
        received = exchange.all_gather(message, [message.numel()] * exchange.ranks, what=what)
        own, total = values.clone(), values.zero_()
        # In the order of ranks, so that what is sent uncompressed has the same mean everywhere.
        for rank, theirs in enumerate(received):
            if rank == exchange.rank:
                total.add_(own)
            else:
                add(theirs, segments, self._codec, total)
        buffer.copy_(total.div_(exchange.ranks))
        raw_bytes = ring_all_reduce_bytes(buffer.nbytes, exchange.ranks)
        self.traffic.add("gradients", exchange.sent_bytes - before, raw_bytes)
        if bucket.is_last():
            self.traffic.end_step()
            self._broadcast_due = bool(self._broadcast_every) and self.traffic.steps % self._broadcast_every == 0
        devices = [buffer.device] if buffer.device.type == "cuda" else []
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    def _broadcast(self, _model: torch.nn.Module, _inputs: Any) -> None:
        """Before a forward pass that trains, where it is due: rank 0's weights for all."""
        if not self._broadcast_due or not torch.is_grad_enabled():
            return
        self._broadcast_due = False
        root = dist.get_global_rank(self._group, 0)
        for parameter in self._parameters:
            dist.broadcast(parameter.detach(), root, group=self._group)
            sent_bytes = (self._exchange.ranks - 1) * parameter.nbytes if self._exchange.rank == 0 else 0
            self.traffic.add("weights", sent_bytes, 0)
