"""The CPU's caching allocator: no two tensors share memory, and no more is held than was in use at once."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal.errors import InputError
from shoal.memory.cpu_allocator import (
    CACHING,
    TORCH,
    active,
    cpu_memory,
    release_unused,
    stop_caching,
    use_caching_allocator,
)
from shoal.memory.limit import memory_limit
from tests import made_up_machine, ranks

KiB, MiB = 2**10, 2**20
SLACK = 10 * MiB  # four pages of 2 MiB, and what is rounded up to one

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="the caching allocator needs Linux and a C++ compiler",
)


@pytest.fixture(autouse=True)
def served() -> None:
    use_caching_allocator()
    release_unused()


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def apart(run: Callable[..., object], *arguments: object, **environment: str) -> object:
    """What a function of this module returns in a process that has imported torch and shoal, and done nothing else."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = ranks.forked(_answer, there, environment, run, *arguments)
    there.close()  # so that the end of the process is seen
    assert here.poll(240)
    answer = here.recv()
    process.join()
    return answer


def _answer(answer: Connection, environment: dict[str, str], run: Callable[..., object], *arguments: object) -> None:
    os.environ.update(environment)
    made_up_machine.put_in_place()
    answer.send(run(*arguments))


@given(st.lists(st.tuples(st.booleans(), st.integers(60 * KiB, 5 * MiB)), max_size=60), st.randoms())
def test_no_tensor_is_written_over_by_another(requests: list[tuple[bool, int]], draw: random.Random) -> None:
    alive: list[tuple[torch.Tensor, int]] = []
    for number, (frees, nbytes) in enumerate(requests):
        if frees and alive:
            alive.pop(draw.randrange(len(alive)))
        else:
            alive.append((block(nbytes).fill_(number), number))
            assert alive[-1][0].data_ptr() % 64 == 0
    for tensor, number in alive:
        assert torch.equal(tensor, torch.full_like(tensor, number))


@given(st.lists(st.integers(64 * KiB, 20 * MiB), min_size=1, max_size=60), st.randoms())
def test_no_more_is_held_than_was_in_use_at_once_and_a_fiftieth(sizes: list[int], draw: random.Random) -> None:
    release_unused()
    before = cpu_memory()
    alive: list[torch.Tensor] = []
    for nbytes in sizes:
        while alive and sum(map(len, alive)) + nbytes > 64 * MiB:
            alive.pop(draw.randrange(len(alive)))
        alive.append(block(nbytes))
        now = cpu_memory()
        assert now.held - before.held <= now.most_in_use - before.in_use + now.most_in_use / 50 + SLACK
        assert now.held >= now.in_use


# What is freed of nine, one, five, one, seven and one MiB, how many are asked for then, and whose place they get.
HOLES = [
    ([2], 5, 2),  # it exists again
    ([0, 2, 4], 4, 2),  # the smallest hole that it fits in, not the first
    ([1, 3, 2], 7, 1),  # neighbouring holes are one, in whichever order they came about
]


def _takes_the_place(freed: list[int], asked_mebibytes: int, expected: int) -> bool:
    use_caching_allocator()
    blocks: list[torch.Tensor | None] = [block(mebibytes * MiB) for mebibytes in (9, 1, 5, 1, 7, 1)]
    address = blocks[expected].data_ptr()  # type: ignore[union-attr]
    for place in freed:
        blocks[place] = None
    return block(asked_mebibytes * MiB).data_ptr() == address


@pytest.mark.parametrize(("freed", "asked_mebibytes", "expected"), HOLES)
def test_which_hole_a_tensor_gets(freed: list[int], asked_mebibytes: int, expected: int) -> None:
    assert apart(_takes_the_place, freed, asked_mebibytes, expected)


def test_unused_memory_goes_back_to_the_system_and_tensors_stay() -> None:
    kept = block(8 * MiB).fill_(3)
    passing = block(64 * MiB).fill_(1)
    del passing
    held = cpu_memory().held
    release_unused()
    assert cpu_memory().held <= held - 60 * MiB
    assert cpu_memory().most_in_use == cpu_memory().in_use
    assert torch.equal(kept, torch.full_like(kept, 3))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_the_process_holds_what_it_says() -> None:
    before, held = resident_bytes(), cpu_memory().held
    tensor = block(64 * MiB).fill_(1)
    assert cpu_memory().held - held >= 64 * MiB
    assert abs((resident_bytes() - before) - (cpu_memory().held - held)) < 8 * MiB
    del tensor
    release_unused()
    assert resident_bytes() - before < 8 * MiB


def test_small_tensors_are_left_to_torch() -> None:
    before = cpu_memory().in_use
    small = block(60 * KiB)
    assert cpu_memory().in_use == before
    large = block(64 * KiB)
    assert cpu_memory().in_use == before + 64 * KiB
    del small, large


def test_bytes_in_use_are_those_of_tensors_in_steps_of_512() -> None:
    before = cpu_memory().in_use
    tensors = [block(MiB + 1), block(100 * KiB)]
    assert cpu_memory().in_use - before == MiB + 512 + 100 * KiB
    del tensors


def test_a_limit_and_the_profiler_count_as_ever() -> None:
    with memory_limit(None) as limit, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        before = limit.live_bytes
        tensors = [block(MiB + 1), block(1000)]
        assert limit.live_bytes - before == MiB + 1001
        del tensors
        assert limit.live_bytes == before
    events = [event.nbytes() for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sorted(events) == [-(MiB + 1), -1000, 1000, MiB + 1]


def test_threads_allocate_and_free_side_by_side() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        alive: list[torch.Tensor] = []
        for _ in range(200):
            alive.append(block(draw.randrange(64 * KiB, MiB)).fill_(number))
            if len(alive) > 8:
                gone = alive.pop(draw.randrange(len(alive)))
                wrong.extend([number] if bool((gone != number).any()) else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _in_child(answer: Connection, tensor: torch.Tensor) -> None:
    before = cpu_memory()
    own = block(8 * MiB).fill_(7)
    answer.send((active(), int(tensor.sum()), cpu_memory().in_use - before.in_use, int(own[-1])))
    tensor.fill_(9)


def forked(run: Callable[..., None], *arguments: object) -> object:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(there, *arguments))
    child.start()
    assert here.poll(60)
    answer = here.recv()
    child.join()
    assert child.exitcode == 0
    return answer


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_reads_tensors_and_allocates_as_torch_does() -> None:
    tensor = torch.ones(MiB, dtype=torch.uint8)
    unused = block(64 * MiB).fill_(1)
    del unused
    held = cpu_memory().held
    assert forked(_in_child, tensor) == (TORCH, MiB, 0, 7)
    assert cpu_memory().held <= held - 60 * MiB  # what nothing uses is not copied from page to page
    assert int(tensor.sum()) == MiB  # its writes are its own


def _switches_on_in_child(answer: Connection, tensor: torch.Tensor) -> None:
    use_caching_allocator()
    before = cpu_memory()
    own = block(8 * MiB).fill_(7)
    answer.send((active(), cpu_memory().in_use - before.in_use, int(tensor[-1]), int(own[-1])))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_may_switch_it_on_again() -> None:
    tensor = torch.ones(MiB, dtype=torch.uint8)
    assert forked(_switches_on_in_child, tensor) == (CACHING, 8 * MiB, 1, 7)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.2, 0.6])
def test_a_step_has_the_same_bits_and_bytes_with_both(share: float) -> None:
    bits, predicted_bytes, measured_bytes = _trained(TORCH, share)
    assert 0 <= predicted_bytes - measured_bytes <= 1024
    assert _trained(CACHING, share) == (bits, predicted_bytes, measured_bytes)


def _trained(kind: str, share: float) -> tuple[list[bytes], int, int]:
    """Gradients after two steps inside a share of plain PyTorch's peak, predicted and measured bytes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    use_caching_allocator() if kind == CACHING else stop_caching()
    assert active() == kind
    layers = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU()]
    for _ in range(4):
        layers += [torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU()]
    plain = torch.nn.Sequential(*layers)
    images = torch.randn(4, 3, 64, 64)
    plain_bytes = shoal.plan(plain, images, "1GiB", allow="bitwise").plain_peak_bytes
    model = shoal.compile(plain, budget=int(share * plain_bytes), allow="bitwise")
    for _ in range(2):
        model(images).square().mean().backward()
        assert active() == kind  # compile leaves it as it is
    found = [p.grad.numpy().tobytes() for p in plain.parameters() if p.grad is not None]
    return found, model.shoal.predicted_peak_bytes, model.shoal.measured_peak_bytes


def _active_after_a_step_and_switched_on() -> list[str]:
    model = shoal.compile(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), "64MiB", allow="recompute")
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    found = [active()]
    use_caching_allocator()
    return [*found, active()]


def test_compile_leaves_the_process_its_allocator() -> None:
    assert apart(_active_after_a_step_and_switched_on) == [TORCH, CACHING]


def test_it_is_refused_while_memory_is_counted() -> None:
    stop_caching()
    with memory_limit(None), pytest.raises(InputError):
        use_caching_allocator()
    use_caching_allocator()
    with memory_limit(None):
        use_caching_allocator()  # it serves already


def test_shoal_is_imported_where_python_has_no_resource_module() -> None:
    program = "import sys; sys.modules['resource'] = None; import shoal"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def _refusal(address_space_bytes: int | None = None) -> str:
    if address_space_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, resource.RLIM_INFINITY))
    with pytest.raises(InputError) as refused:
        use_caching_allocator()
    return refused.value.message


def test_a_limited_address_space_is_left_to_torch() -> None:
    assert "the address space of the process is limited (ulimit -v)" in str(apart(_refusal, 2**45))


def test_without_a_compiler_it_is_refused() -> None:
    told = apart(_refusal, PATH="", CXX="")
    assert "the caching allocator of the CPU needs a C++ compiler" in str(told)
