"""In distributed data parallel a compiled model trains as the plain one does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.compile.compiled import compiled
from tests.engine.training_laws import (
    blocks,
    costs_that_do_not_matter,
    differences,
    images,
    same_bits,
    train,
)
from tests.ranks import run_on_ranks


def train_one_rank() -> tuple[list[str], int, torch.Tensor]:
    """Trains a plain and a planned model, each wrapped in distributed data parallel, on this rank's half."""
    net = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))
    batches = [batch.chunk(2)[torch.distributed.get_rank()] for batch in images(3, 8, 3, 8, 8)]
    with costs_that_do_not_matter():
        planned = compiled(net)
        found = train(nn.parallel.DistributedDataParallel(planned), batches)
    expected = train(nn.parallel.DistributedDataParallel(net), batches)
    return differences(found, expected), len(planned.shoal.plan.recomputed), found["0: gradient of module.0.0.weight"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_in_distributed_data_parallel_every_rank_trains_like_plain_pytorch() -> None:
    (wrong, recomputed, gradient), (also_wrong, _, same_gradient) = run_on_ranks(train_one_rank, 2)
    assert (wrong, also_wrong) == ([], [])
    assert recomputed > 0
    assert same_bits(gradient, same_gradient)
