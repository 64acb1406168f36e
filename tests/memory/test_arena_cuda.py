"""Segments of a CUDA pool lie in one block where they were planned; the replay is tested with host memory."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.memory import arena_cuda
from shoal.memory.arena_cuda import CudaArena

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="an arena needs a C++ compiler"
)
MiB = 2**20
DEVICE = 7  # of the stand-in


class HostMemory:
    """Stands in for cudaMalloc and cudaFree."""

    def __init__(self) -> None:
        self.held: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.malloc = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)(self._malloc)
        self.free = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._free)

    def _malloc(self, out: ctypes._Pointer[ctypes.c_void_p], nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        out[0] = ctypes.c_void_p(ctypes.addressof(memory))
        self.held[ctypes.addressof(memory)] = memory
        return 0

    def _free(self, address: int) -> int:
        del self.held[address]
        return 0


@pytest.fixture(scope="module")
def memory() -> Iterator[HostMemory]:
    memory = HostMemory()
    arena_cuda._library().arena_cuda_use(
        ctypes.cast(memory.malloc, ctypes.c_void_p), ctypes.cast(memory.free, ctypes.c_void_p)
    )
    yield memory


@needs_compiler
@given(
    planned=st.lists(st.sampled_from([512, 1024, 4096]), max_size=5),
    asked=st.lists(st.tuples(st.sampled_from([512, 1024, 2048]), st.integers(1, 8)), max_size=12),
)
def test_no_two_segments_overlap_and_those_beyond_the_plan_are_counted(
    memory: HostMemory, planned: list[int], asked: list[tuple[int, int]]
) -> None:
    library = arena_cuda._library()
    before = set(memory.held)
    assert library.arena_cuda_plan(DEVICE, len(planned), (ctypes.c_int64 * len(planned))(*planned)) == 0
    block = next(iter(set(memory.held) - before), 0)
    live: dict[int, tuple[int, int]] = {}  # address → bytes, when it is freed
    elsewhere = 0
    for now, (size, life) in enumerate(asked):
        for address, (nbytes, _) in [each for each in live.items() if each[1][1] <= now]:
            library.arena_cuda_free(address, nbytes, DEVICE, None)
            del live[address]
        address = library.arena_cuda_alloc(size, DEVICE, None)
        assert all(address + size <= at or at + nbytes <= address for at, (nbytes, _) in live.items())
        elsewhere += not block <= address < block + sum(planned)
        live[address] = (size, now + life)
    assert library.arena_cuda_departures(DEVICE) == (elsewhere if planned else 0)
    assert library.arena_cuda_asked(DEVICE, None) == len(asked)
    taken = sum(block <= address < block + sum(planned) for address in live)
    assert (library.arena_cuda_plan(DEVICE, 0, None) == -1) == (taken > 0)
    for address, (nbytes, _) in live.items():
        library.arena_cuda_free(address, nbytes, DEVICE, None)
    assert library.arena_cuda_plan(DEVICE, 0, None) == 0
    assert set(memory.held) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_it_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="torch sees no CUDA device"):
        CudaArena()


@pytest.mark.gpu
def test_a_training_on_cuda_has_the_same_losses_and_no_departures() -> None:
    def run(arena: CudaArena | None) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)).cuda()
        images = torch.randn(32, 3, 64, 64, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []

        def step() -> None:
            loss = model(images).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for _ in range(6):
            if arena is None:
                step()
            else:
                with arena.step():
                    step()
        return [loss.item() for loss in losses]

    torch.backends.cudnn.deterministic = True
    plain = run(None)
    with CudaArena() as arena:
        assert run(arena) == plain
        assert arena.replayed_steps >= 2
        assert arena.departures == 0
        assert arena.bytes >= arena.highest_live_bytes > 0
        with pytest.raises(InputError, match="open already"):
            CudaArena()
