"""DDP's buckets: how it assigns a model's gradients to them, and the communication hook that it calls for each.

DDP compares the hook's annotations with the types themselves, so this module does not postpone their evaluation.
"""

from collections.abc import Iterable

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from shoal.distributed.gradients.ddp_reducer import DdpReducer

DEFAULT_BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # DDP's default, so that the first all-reduce starts early


def expected_buckets(
    parameters: Iterable[tuple[int, bool]], cap_bytes: int, first_cap_bytes: int = FIRST_BUCKET_BYTES
) -> list[tuple[int, int]]:
    """The buckets after DDP's first step, which fills them in the order in which gradients come.

    Args:
        parameters: in the order in which the model has them: how many float32 values, and whether they may be encoded.
        cap_bytes: a bucket that reaches it is full: `bucket_cap_mb` of DDP.
        first_cap_bytes: the same of the first.

    Returns:
        Of each bucket, the values that may be encoded and those that may not.

    >>> expected_buckets([(1000, True), (10, False), (3000, True)], cap_bytes=8000, first_cap_bytes=4000)
    [(3000, 0), (1000, 10)]
    """
    buckets: list[tuple[int, int]] = []
    coded = raw = 0
    for elems, encoded in reversed(list(parameters)):
        coded, raw = (coded + elems, raw) if encoded else (coded, raw + elems)
        if 4 * (coded + raw) >= (cap_bytes if buckets else first_cap_bytes):
            buckets.append((coded, raw))
            coded = raw = 0
    return [*buckets, (coded, raw)] if coded or raw else buckets


def shoal_gradients_hook(state: DdpReducer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP calls it when a bucket's gradients are ready; `state` is what `register_comm_hook` was given."""
    return state.reduce(bucket)
