"""FSDP2's records and the default group's store are there, and name what torch has in them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shoal.lowlevel import process_groups
from tests.ranks import run_on_ranks


def look_at_records() -> dict[str, object]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model[0])
    fully_shard(model)
    modules = dict(process_groups.sharded_modules(model))
    (group,) = process_groups.parameter_groups(modules["0"])
    weight, bias = group.fsdp_params
    shard = process_groups.local_shard(weight)
    own_reduce, own_gather = process_groups.reduce_scatter_of(group), process_groups.all_gather_of(group)
    modules["0"].set_custom_reduce_scatter(own_reduce)
    process_groups.set_all_gather(group, own_gather)
    process_groups.replace_local_shard(weight, shard.clone())
    model(torch.ones(5, 4)).sum().backward()
    return {
        "modules": sorted(modules),
        "elems": [process_groups.unsharded_elems(record) for record in (weight, bias)],
        "shard": tuple(shard.shape),
        "padded": process_groups.padded_shard(weight).numel(),
        "replaced": process_groups.local_shard(weight) is not shard,
        "same_comms": (
            process_groups.reduce_scatter_of(group) is own_reduce and process_groups.all_gather_of(group) is own_gather
        ),
        "gradient": weight.sharded_param.grad.to_local().numel(),
    }


def test_fsdp2s_records_of_a_sharded_model() -> None:
    first, last = run_on_ranks(look_at_records, 2)
    expected = {
        "modules": ["", "0"],
        "elems": [12, 3],
        "shard": (2, 4),  # of (3, 4)
        "padded": 8,
        "replaced": True,
        "same_comms": True,
        "gradient": 8,
    }
    assert first == expected
    assert last == expected | {"shard": (1, 4), "gradient": 4}


def test_a_plain_model_has_no_records() -> None:
    assert not list(process_groups.sharded_modules(nn.Linear(2, 2)))


def count_up() -> list[int]:
    dist.barrier()
    return [process_groups.add_in_store("shoal/test", 1), process_groups.add_in_store("shoal/test", 10)]


def test_ranks_add_to_one_counter() -> None:
    counts = run_on_ranks(count_up, 2)
    assert max(after for each in counts for after in each) == 22
    assert len({after for each in counts for after in each}) == 4
