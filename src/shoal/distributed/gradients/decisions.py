"""How gradients are sent, as asked for or as measured, and why: the same for DDP's buckets and FSDP2's modules."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from shoal.codecs import registry
from shoal.codecs.codec import Codec
from shoal.codecs.float_codec import FLOATS
from shoal.core.sizes import format_bytes
from shoal.distributed.comm.traffic import Traffic
from shoal.distributed.gradients.bucket_segments import ParameterGrad
from shoal.distributed.gradients.choose_codec import Chooser, Decision


def decide(
    gradients: Iterable[ParameterGrad], dtype: torch.dtype, ranks: int, codec: Codec | None, chooser: Chooser | None
) -> tuple[Decision, Codec | None]:
    """How what is reduced together is sent, the same on every rank; None for uncompressed.

    Args:
        gradients: all of it, over all ranks.
        dtype: in which it is reduced.
        ranks: that reduce it.
        codec: what was asked for, where nothing was measured.
        chooser: what was measured.

    >>> from shoal.distributed.gradients.bucket_segments import ParameterGrad
    >>> gradients = ParameterGrad("weight", 100, encoded=True), ParameterGrad("bias", 10, encoded=False)
    >>> decision, codec = decide(gradients, torch.float32, 2, registry.get("bf16"), None)
    >>> decision.reason, decision.elems, codec.name
    ('bf16, as asked', 110, 'bf16')
    """
    encoded = raw = 0
    for gradient in gradients:
        encoded, raw = (encoded + gradient.elems, raw) if gradient.encoded else (encoded, raw + gradient.elems)
    if dtype not in FLOATS:
        return _asked(None, f"uncompressed: no codec takes {dtype}", encoded + raw), None
    if chooser is not None:
        decision = chooser.decide(encoded, raw, dtype.itemsize)
        return decision, None if decision.codec is None else registry.get(decision.codec)
    if ranks == 1 or codec is None:
        return _asked(
            None, "uncompressed: there is one rank" if ranks == 1 else "uncompressed, as asked for", encoded + raw
        ), None
    if not encoded:
        return _asked(None, "uncompressed: no parameter in it has two dimensions", raw), None
    return _asked(codec.name, f"{codec.name}, as asked", encoded + raw), codec


def explained(traffic: Traffic, ranks: int, lines: Iterable[str]) -> str:
    """The bytes of the last step, above the lines on how each part is sent.

    >>> traffic = Traffic()
    >>> traffic.add("gradients", sent_bytes=2**20, raw_bytes=2**22)
    >>> traffic.end_step()
    >>> explained(traffic, 2, ["bucket 0: bf16"]).splitlines()
    ['2 ranks: 1.000 MiB of gradients a step instead of 4.000 MiB (0.250)', 'bucket 0: bf16']
    """
    step = traffic.last_step("gradients")
    sent, raw = format_bytes(step.sent_bytes), format_bytes(step.raw_bytes)
    return "\n".join([f"{ranks} ranks: {sent} of gradients a step instead of {raw} ({step.share:.3f})", *lines])


def _asked(codec: str | None, reason: str, elems: int) -> Decision:
    """A decision without measurements."""
    return Decision(codec, elems, math.nan, math.nan, 0.0, 0.0, 0, 0, reason)
