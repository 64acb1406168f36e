"""Gradients between ranks in fewer bytes: `compress_gradients`, for DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal.codecs import registry
from shoal.codecs.codec import Codec
from shoal.codecs.float_codec import FloatCodec
from shoal.distributed.comm.agreement import agree, described, fingerprint, short_hash
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.message import HEADER_BYTES
from shoal.distributed.comm.traffic import Traffic, ring_all_reduce_bytes
from shoal.distributed.gradients.bucket_segments import CHUNK_ELEMS, ParameterGrad, cut, message_bytes
from shoal.distributed.gradients.choose_codec import Chooser, Decision, decide, explained
from shoal.distributed.gradients.ddp_reducer import DEFAULT_BUCKET_BYTES, DdpReducer, expected_buckets
from shoal.distributed.gradients.error_feedback import ErrorFeedback
from shoal.distributed.gradients.measure_rates import measure_choice
from shoal.distributed.gradients.sharded_gradients import CompressedShards, is_sharded
from shoal.errors import InputError

_WIDEST = "bf16"  # of all that "auto" may choose


@overload
def compress_gradients(  # type: ignore[overload-overlap]  # the first that fits is taken
    ddp_model: DistributedDataParallel,
    codec: str | Codec | None = ...,
    *,
    error_feedback: bool | None = ...,
    timeout_seconds: float = ...,
) -> CompressedGradients: ...


@overload
def compress_gradients(
    ddp_model: torch.nn.Module,
    codec: str | Codec | None = ...,
    *,
    error_feedback: bool | None = ...,
    timeout_seconds: float = ...,
) -> CompressedShards: ...


def compress_gradients(
    ddp_model: torch.nn.Module,
    codec: str | Codec | None = "auto",
    *,
    error_feedback: bool | None = None,
    timeout_seconds: float = 600.0,
) -> CompressedGradients | CompressedShards:
    """Let DDP average gradients as codes: encode, all-to-all, sum in float32, encode, all-gather, decode.

    Replaces DDP's own all-reduce (`register_comm_hook`). A collective call, once, before the first backward pass.
    Each gradient is rounded twice at most, for any number of ranks, and 8-bit codecs send a quarter of float32's
    bytes. All ranks decode the same bytes, so that their weights stay equal to the bit. Parameters of less than two
    dimensions (biases, scales of batch norms) are sent uncompressed; blocks that share a scale never hold values of two
    parameters. Exchanges run concurrently with the backward pass, bucket by bucket.

    With one rank, gradients are those of plain DDP, to the bit.

    Args:
        ddp_model: on a group of gloo or NCCL; or a model that `fully_shard` was applied to, whose gradients are encoded
            once, on the way to the ranks that hold their shards.
        codec: the name of a codec of floats, such as "dynamic_tree", or a codec; "auto": links and codecs are measured
            now, and each bucket is sent in what is fastest, or uncompressed; None: all are sent uncompressed.
        error_feedback: add what encoding lost to the next gradient of the same parameter; takes a float32 a parameter
            value, and a rank's share again. None: only for one_bit, which needs it.
        timeout_seconds: for each exchange.

    Returns:
        What can be read, saved and closed.

    Raises:
        InputError: the model is neither a DistributedDataParallel nor sharded, or an argument is not so.
        CodecError: there is no codec of this name.
        TransferError: ranks differ in model, codec, options, bucket size or version of Shoal: on every rank, with what
            differs. Another rank failed while links were measured. Later `backward()` raises it on every rank when
            one died, sent nothing in time, sent something else or met an error; then start from the last checkpoint.

    Example, in each of two processes that torchrun started:

        model = DistributedDataParallel(network)
        gradients = shoal.distributed.compress_gradients(model, "dynamic_tree")
        ...  # train as always
        print(gradients.explain())
        # 2 ranks: 11.2 MiB of gradients a step instead of 44.6 MiB (0.251)
        # bucket 0, 11164362 values: dynamic_tree, as asked

    Limits: residuals of error feedback are in units of GradScaler's scale of its step. float64 is sent uncompressed.
    Where all buckets are sent uncompressed, no hook is set, and errors of other ranks are torch.distributed's.
    """
    sharded = isinstance(ddp_model, torch.nn.Module) and is_sharded(ddp_model)
    if not sharded and not isinstance(ddp_model, DistributedDataParallel):
        got = type(ddp_model).__name__
        raise InputError(f"got a {got}, expected torch.nn.parallel.DistributedDataParallel; wrap the model in it first")
    chosen = registry.get(codec) if isinstance(codec, str) and codec != "auto" else codec
    if isinstance(chosen, Codec) and not isinstance(chosen, FloatCodec):
        raise InputError(f"got codec {chosen.name}, expected one that encodes gradients, such as dynamic_tree")
    if error_feedback is None:
        error_feedback = isinstance(chosen, Codec) and chosen.name == "one_bit"
    if not isinstance(ddp_model, DistributedDataParallel):
        return CompressedShards(ddp_model, chosen, error_feedback, timeout_seconds)
    return CompressedGradients(ddp_model, chosen, error_feedback, timeout_seconds)


class CompressedGradients:
    """What `compress_gradients` set up.

    Attributes:
        traffic: bytes put on the wire by this rank, of kind "gradients"; each backward pass that reduces is a step.
        rank, ranks: of this process in the model's group, and how many.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: Codec | str | None,
        error_feedback: bool,
        timeout_seconds: float,
    ) -> None:
        self.traffic = Traffic()
        self._model = model
        self._group: Any = model.process_group
        self.rank: int = dist.get_rank(self._group)
        self.ranks: int = dist.get_world_size(self._group)
        self._asked = codec
        self._codec = codec if isinstance(codec, Codec) else None
        self._chooser: Chooser | None = None
        self._feedback = ErrorFeedback(self.ranks, self.rank) if error_feedback else None
        self._reducer: DdpReducer | None = None
        self._handles: list[Any] = []
        self._parameters = dict(model.module.named_parameters())
        self._trained = [ParameterGrad.of(name, p) for name, p in self._parameters.items() if p.requires_grad]
        if self.ranks > 1:
            self._set_up(timeout_seconds)
        if self._reducer is None:
            self._handles.append(model.register_forward_pre_hook(self._count_plain))

    @property
    def decisions(self) -> dict[int, Decision]:
        """How each bucket is sent, by its number, as of the last backward pass."""
        return {} if self._reducer is None else dict(sorted(self._reducer.decisions.items()))

    def explain(self) -> str:
        """The bytes of the last step, and for each bucket how it is sent and why, a line each."""
        if self._reducer is not None:
            lines = [f"bucket {number}, {d.elems} values: {d.reason}" for number, d in self.decisions.items()]
        elif self._chooser is not None:
            expected = dict.fromkeys(self._expected_buckets())  # buckets of one size once
            lines = ["every bucket uncompressed: encoding would not save enough in total"]
            lines += [f"buckets of {sum(bucket)} values: {self._chooser.decide(*bucket).reason}" for bucket in expected]
        else:
            lines = ["every bucket: uncompressed"]
        return explained(self.traffic, self.ranks, lines)

    def state_dict(self) -> dict[str, Any]:
        """Residuals of this rank; to be saved by every rank in addition to the model's."""
        return {"feedback": None if self._feedback is None else self._feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Args:
            state: of `state_dict`, of the same rank.

        Raises:
            InputError: it is of another rank, of another number of ranks, or of another model.
        """
        if self._feedback is not None and state["feedback"] is not None:
            elems = {name: parameter.numel() for name, parameter in self._parameters.items()}
            device = next(iter(self._parameters.values())).device
            self._feedback.load_state_dict(state["feedback"], elems, device)

    def close(self) -> None:
        """All-reduce every bucket uncompressed from now on, and free threads and process groups. A collective call."""
        if self._reducer is not None:
            self._reducer.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _set_up(self, timeout_seconds: float) -> None:
        # Whatever was asked for here: where another rank asked for something else, both hear of it.
        scatter = Exchange(self._group, timeout_seconds=timeout_seconds)
        agree(scatter, "compress_gradients", **self._settings())
        declines = self._asked is None
        if self._asked == "auto":
            device = next(iter(self._parameters.values())).device
            elems = sum(parameter.numel() for parameter in self._parameters.values())
            self._chooser = measure_choice(scatter, self._group, device=device, largest_elems=elems)
            declines = self._chooser.declines(self._expected_buckets())
            agree(scatter, "compress_gradients", measured=short_hash(str(self._chooser)))  # so that all decide alike
        if declines:
            scatter.close()
            return
        gather = Exchange(self._group, timeout_seconds=timeout_seconds)
        self._reducer = DdpReducer(
            self._group,
            {id(parameter): name for name, parameter in self._parameters.items()},
            self._decide,
            self._feedback,
            scatter,
            gather,
            self.traffic,
        )
        self._model.register_comm_hook(self._reducer, DdpReducer.reduce)
        # A budget counts it: `shoal.memory.static_memory` asks the wrapper that calls the compiled network.
        self._model.hook_bytes = hook_bytes(  # type: ignore[assignment]
            self._trained,
            len(self._expected_buckets()),
            registry.get(_WIDEST) if self._codec is None else self._codec,
            self.ranks,
            error_feedback=self._feedback is not None,
        )
        self._handles.append(self._model.register_forward_pre_hook(self._raise_failure))

    def _settings(self) -> dict[str, object]:
        model = self._model
        return {
            "codec": described(self._asked),
            "error_feedback": self._feedback is not None,
            "model": fingerprint(self._parameters.items()),
            "bucket_cap_bytes": getattr(model, "bucket_bytes_cap", DEFAULT_BUCKET_BYTES),
            "find_unused_parameters": model.find_unused_parameters,
            "static_graph": model.static_graph,
            "broadcast_buffers": model.broadcast_buffers,
        }

    def _expected_buckets(self) -> list[tuple[int, int]]:
        cap_bytes = int(getattr(self._model, "bucket_bytes_cap", DEFAULT_BUCKET_BYTES))
        return expected_buckets([(gradient.elems, gradient.encoded) for gradient in self._trained], cap_bytes)

    def _decide(self, gradients: tuple[ParameterGrad, ...], dtype: torch.dtype) -> tuple[Decision, Codec | None]:
        return decide(gradients, dtype, self.ranks, self._codec, self._chooser)

    def _raise_failure(self, _model: torch.nn.Module, _inputs: Any) -> None:
        """Before DDP broadcasts buffers, which after an error would hang or raise its own."""
        if self._reducer is not None:
            self._reducer.raise_failure()

    def _count_plain(self, model: torch.nn.Module, _inputs: Any) -> None:
        """Without a hook the backward pass goes unseen: every forward pass that syncs is counted as its step."""
        if torch.is_grad_enabled() and model.training and model.require_backward_grad_sync:
            trained = sum(parameter.nbytes for parameter in self._parameters.values() if parameter.requires_grad)
            sent_bytes = ring_all_reduce_bytes(trained, self.ranks)
            self.traffic.add("gradients", sent_bytes, sent_bytes)
            self.traffic.end_step()


def hook_bytes(
    gradients: Sequence[ParameterGrad], buckets: int, codec: Codec, ranks: int, *, error_feedback: bool
) -> int:
    """What the hook holds at most for gradients of these parameters: messages and their headers, and residuals.

    >>> weight = ParameterGrad("weight", 1_000_000, encoded=True)
    >>> hook_bytes([weight], 1, registry.get("dynamic_tree"), 2, error_feedback=False)
    2002992
    """
    # At most all is under way: to the ranks that sum it, from the others for the own sum, and the means of all.
    whole_bytes = sum(message_bytes(shard, codec) for shard in cut(gradients, ranks))
    messages = 2 * (ranks - 1) / ranks + 1
    elems = sum(gradient.elems for gradient in gradients)
    exchanges = 2 * (buckets + elems // CHUNK_ELEMS)
    residual_bytes = 6.2 * elems if error_feedback else 0  # a value each, and a rank's share of the means
    return int(messages * whole_bytes + 2 * (ranks - 1) * HEADER_BYTES * exchanges + residual_bytes)
