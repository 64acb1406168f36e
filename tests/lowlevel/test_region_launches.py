"""A region's kernels launched by themselves: the calls of Inductor's code, and that code where these would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.lowlevel.region_launches import launches_of

METHOD = """
class Runner:
    def call(self, args):
        x, weight = args
        args.clear()
        with torch.cuda._DeviceGuard(1):
            torch.cuda.set_device(1)
            {aligned}
            total = empty_strided_cuda((2,), (1,), torch.float32)
            # the stream is asked for before each launch
            stream1 = get_raw_stream(1)
            summed.run(x, total, 2, stream=stream1)
            result = empty_strided_cuda((2,), (1,), torch.float32)
            stream1 = get_raw_stream(1)
            scaled.run(total, weight, result, 2, stream=stream1)
            del total
        return (result, )

call = Runner().call
"""
FUNCTION = """
def call(args):
    x, = args
    args.clear()
    with torch.cuda._DeviceGuard(1):
        result = empty_strided_cuda((2,), (1,), torch.float32)
        stream1 = get_raw_stream(1)
        {kernel}(x, result, 2, stream=stream1)
    return (result, )
"""


def kernel(launch: Callable[..., None], **others: Any) -> Any:
    return SimpleNamespace(launchers=[launch], run=lambda *_, **__: pytest.fail("looked before it launched"), **others)


def summed(x: torch.Tensor, out: torch.Tensor, size: int, stream: int) -> None:
    assert (size, stream) == (2, 7)
    out.copy_(x + x)


def scaled(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, size: int, stream: int) -> None:
    assert (size, stream) == (2, 7)
    torch.mul(x, weight, out=out)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)


def module(text: str, folder: Path, **kernels: Any) -> SimpleNamespace:
    """A module of such text, as Inductor writes it; `asked` counts who asks for the stream."""
    path = folder / "generated.py"
    path.write_text(text)
    asked: list[int] = []

    def get_raw_stream(device: int) -> int:
        asked.append(device)
        return 7

    scope: dict[str, Any] = {
        "torch": torch,
        "empty_strided_cuda": lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype),
        "get_raw_stream": get_raw_stream,
        **kernels,
    }
    exec(compile(text, str(path), "exec"), scope)
    return SimpleNamespace(call=scope["call"], asked=asked)


@pytest.mark.parametrize("aligned", ["pass", "x = copy_if_misaligned(x)"], ids=["2.11", "2.13"])
def test_kernels_are_launched_in_their_order_by_what_launches_them(aligned: str, tmp_path: Path) -> None:
    text = METHOD.format(aligned=aligned).replace("            pass\n", "")
    made = module(text, tmp_path, summed=kernel(summed), scaled=kernel(scaled))
    launches = launches_of(made.call, "region")
    assert launches is not None and launches.__name__ == "region"
    [result] = launches(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    assert result.tolist() == [6.0, 16.0]
    assert made.asked == [1]


def looking(model: Callable[..., Any], seen: list[list[torch.Tensor]]) -> Callable[..., Any]:
    """What PyTorch wraps code in that copies operands which are not aligned; here it takes note of them."""
    inputs_to_check = [0]

    def run(new_inputs: list[torch.Tensor]) -> Any:
        assert model is not None and inputs_to_check
        seen.append(new_inputs)
        return ("as Inductor has it",)

    return run


def test_operands_that_are_not_aligned_go_to_what_copies_them(tmp_path: Path) -> None:
    made, seen = (
        module(FUNCTION.format(kernel="summed.run"), tmp_path, summed=kernel(summed)),
        list[list[torch.Tensor]](),
    )
    launches = launches_of(looking(made.call, seen), "region")
    assert launches is not None
    block = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert block.data_ptr() % 16 == 0
    assert launches(block[4:])[0].tolist() == [8.0, 10.0] and not seen
    assert launches(block[1:3]) == ("as Inductor has it",)
    [[operand]] = seen
    assert operand.tolist() == [1.0, 2.0]


def test_on_another_device_and_under_a_profiler_inductors_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [1]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    made, seen = (
        module(FUNCTION.format(kernel="summed.run"), tmp_path, summed=kernel(summed)),
        list[list[torch.Tensor]](),
    )
    launches = launches_of(looking(made.call, seen), "region")
    assert launches is not None
    x = torch.tensor([1.0, 2.0])
    current[0] = 0
    assert launches(x) == ("as Inductor has it",)
    current[0] = 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert launches(x) == ("as Inductor has it",)
    assert launches(x)[0].tolist() == [2.0, 4.0] and len(seen) == 2


@pytest.mark.parametrize(
    "one",
    [
        kernel(summed, dump_launch_params=True),
        SimpleNamespace(launchers=[summed, summed]),
        SimpleNamespace(launchers=[]),
        SimpleNamespace(),
    ],
    ids=["recorded", "not tuned", "not compiled", "of another version"],
)
def test_a_kernel_that_has_no_one_way_to_be_launched_stays_inductors(one: Any, tmp_path: Path) -> None:
    assert launches_of(module(FUNCTION.format(kernel="summed.run"), tmp_path, summed=one).call, "region") is None


def test_the_launcher_that_pytorch_keeps_is_taken(tmp_path: Path) -> None:
    one = kernel(lambda *_, **__: pytest.fail("the slower one"), _cached_launcher=summed)
    launches = launches_of(module(FUNCTION.format(kernel="summed.run"), tmp_path, summed=one).call, "region")
    assert launches is not None and launches(torch.tensor([1.0, 2.0]))[0].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "text",
    [
        FUNCTION.format(kernel="extern_kernels.mm"),
        FUNCTION.format(kernel="summed.run").replace("    args.clear()\n", ""),
        FUNCTION.format(kernel="summed.run").replace("        result =", "        print()\n        result ="),
        "call = print",
        "class Called:\n    def __call__(self, args):\n        return args\ncall = Called()",
    ],
    ids=["a library's kernel", "operands kept", "something else called", "a builtin", "an object"],
)
def test_code_of_another_form_stays_inductors(text: str, tmp_path: Path) -> None:
    assert launches_of(module(text, tmp_path, summed=kernel(summed)).call, "region") is None
