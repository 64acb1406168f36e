"""A host slab is memory that torch's allocator knows nothing of."""

from __future__ import annotations

import shutil

import pytest
import torch

from shoal.errors import TransferError
from shoal.memory.limit import memory_limit
from shoal.offload.links.host import HostSlab


def test_what_is_written_is_read_again_at_its_offset() -> None:
    slab = HostSlab(3 * 4096)
    out, back = torch.arange(1000, dtype=torch.int32), torch.zeros(1000, dtype=torch.int32)
    slab.write(4096, out.data_ptr(), out.nbytes)
    slab.read(4096, back.data_ptr(), back.nbytes)
    assert torch.equal(out, back)
    assert not slab.bytes[:4096].any() and not slab.bytes[8192:].any()


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)
def test_it_is_none_of_torchs_bytes() -> None:
    with memory_limit(None) as w:
        before_bytes = w.live_bytes
        slab = HostSlab(1 << 24)
        assert w.peak_bytes == before_bytes
        assert slab.nbytes == 1 << 24


def test_more_than_there_can_be_is_said_in_one_line() -> None:
    for nbytes in (1 << 56, 1 << 70):
        with pytest.raises(TransferError):
            HostSlab(nbytes)


@pytest.mark.gpu
def test_a_pinned_slab_is_pinned_until_it_dies() -> None:
    slab = HostSlab(1 << 20, pinned=True)
    assert slab.bytes.is_pinned()
    part = slab.bytes[:10].clone()
    assert not part.is_pinned()
    del slab
    torch.cuda.synchronize()
