"""Under Inductor and in distributed data parallel a compiled model trains as the plain one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compile.compiled import compiled
from tests.training_laws import (
    blocks,
    costs_that_do_not_matter,
    differences,
    images,
    needs_compiler,
    same_bits,
    train,
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_inductor_trains_the_same_up_to_rounding(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.SiLU(), nn.Conv2d(8, 8, 2))
    batches = images(2, 4, 3, 8, 8)
    planned = compiled(net, inner="inductor")
    with costs_that_do_not_matter():
        torch.testing.assert_close(train(planned, batches), train(net, batches), rtol=1e-4, atol=1e-5)
    assert planned.shoal.plan.recomputed


def train_one_rank(rank: int, folder: str) -> None:
    """Trains a plain and a planned model, each wrapped in distributed data parallel, on this rank's half."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))
    batches = [batch.chunk(2)[rank] for batch in images(3, 8, 3, 8, 8)]
    with costs_that_do_not_matter():
        planned = compiled(net)
        found = train(nn.parallel.DistributedDataParallel(planned), batches)
    expected = train(nn.parallel.DistributedDataParallel(net), batches)
    gradient = found["0: gradient of module.0.0.weight"]
    torch.save((differences(found, expected), len(planned.shoal.plan.recomputed), gradient), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_in_distributed_data_parallel_every_rank_trains_like_plain_pytorch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_one_rank, (str(tmp_path),), nprocs=2)
    (wrong, recomputed, gradient), (also_wrong, _, same_gradient) = (torch.load(tmp_path / f"{r}.pt") for r in (0, 1))
    assert (wrong, also_wrong) == ([], [])
    assert recomputed > 0
    assert same_bits(gradient, same_gradient)
