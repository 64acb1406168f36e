"""The communication hook that DDP calls for every bucket: a plain function, annotated as DDP checks it.

DDP compares annotations with the types themselves, so that this module does not postpone their evaluation.
"""

from typing import Protocol

import torch
from torch._C._distributed_c10d import GradBucket


class Reducer(Protocol):
    """What reduces a bucket."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The bucket's mean over the ranks, when it is there."""


def shoal_gradients_hook(state: Reducer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP calls it when a bucket's gradients are ready; `state` is what `register_comm_hook` was given."""
    return state.reduce(bucket)
