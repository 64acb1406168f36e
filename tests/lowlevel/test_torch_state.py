"""State of torch that has no public name exists, and says what is going on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook

from shoal.lowlevel import torch_state


def during_backward(look: Callable[[], object]) -> list[object]:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(look()))
    x.sum().backward()
    return seen


def test_each_backward_pass_has_a_number_of_its_own() -> None:
    numbers = during_backward(torch_state.backward_pass) + during_backward(torch_state.backward_pass)
    assert None not in numbers
    assert len(set(numbers)) == 2
    assert torch_state.backward_pass() is None


def test_callbacks_run_in_order_when_the_backward_pass_has_ended() -> None:
    order: list[str] = []

    def ask() -> None:
        torch_state.call_at_end_of_backward(lambda: order.append("first"))
        torch_state.call_at_end_of_backward(lambda: order.append("second"))
        order.append("asked")

    during_backward(ask)
    assert order == ["asked", "first", "second"]
    with pytest.raises(RuntimeError):
        torch_state.call_at_end_of_backward(lambda: None)


def test_the_innermost_saved_tensors_hooks_are_seen() -> None:
    assert torch_state.saved_tensors_hooks() is None
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert torch_state.saved_tensors_hooks() is not None


def test_transforms_of_torch_func_and_forward_mode_are_told_apart() -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch_state.in_functorch(), torch_state.in_transform()))
        return x.sum()

    seen: list[tuple[bool, bool]] = []
    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    with forward_ad.dual_level():
        look(torch.ones(2))
    assert seen == [(False, False), (True, True), (False, True)]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_traces_of_jit_and_fx_are_seen() -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_state.in_trace())
        return x + 1

    seen: list[bool] = []
    look(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    fx.symbolic_trace(look)
    assert seen == [False, True, True]


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_any_kind_of_hook_is_seen(kind: str) -> None:
    module = nn.ReLU()
    assert not torch_state.has_hooks(module)
    handle = getattr(module, f"register_{kind}")(lambda *_: None)
    assert torch_state.has_hooks(module)
    handle.remove()
    assert not torch_state.has_hooks(module)


def test_hooks_of_all_modules_are_seen() -> None:
    assert not torch_state.has_global_hooks()
    handle = register_module_forward_hook(lambda *_: None)
    assert torch_state.has_global_hooks()
    handle.remove()
    assert not torch_state.has_global_hooks()


def test_a_compiled_module_has_another_call() -> None:
    module = nn.ReLU()
    assert torch_state.compiled_call(module) is None
    module.compile(backend="eager")
    assert torch_state.compiled_call(module) is not None


def test_no_ddp_module_is_active_outside_of_its_forward_pass() -> None:
    assert torch_state.active_ddp_module() is None


def test_a_subclass_without_torch_function_returns_plain_tensors() -> None:
    class Shard(torch.Tensor):
        __torch_function__ = torch_state.no_torch_function

    assert type(torch.ones(2).as_subclass(Shard) + 1) is torch.Tensor


def test_a_batch_norm_refuses_what_its_own_forward_refuses() -> None:
    layer = nn.BatchNorm2d(3)
    torch_state.check_batch_norm_input(layer, torch.ones(2, 3, 4, 4))
    torch_state.check_batch_size(torch.ones(2, 3, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        torch_state.check_batch_norm_input(layer, torch.ones(2, 3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch_state.check_batch_size(torch.ones(1, 3, 1, 1))


def test_a_storage_is_found_while_a_tensor_uses_it() -> None:
    x = torch.ones(4)
    reference = StorageWeakRef(x.untyped_storage())
    found = torch_state.storage_of(reference)
    assert found is not None
    assert found.data_ptr() == x.data_ptr()
    del x, found
    assert torch_state.storage_of(reference) is None
