"""Outside of compilers, modes and transforms an op runs by its own functions, with the same results."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import InputError
from shoal.kernels.norm.norm_conv import norm_conv
from shoal.kernels.norm.norm_conv_native import ConvWindow
from tests.raising import raising

_WINDOW = ConvWindow([1, 1], [0, 0], [1, 1], 1)


class _Seen(TorchDispatchMode):
    """Notes the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _tensors(frozen: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Two parts of x, mean, scale, shift, weight."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 3, 4, 4), (2, 2, 4, 4), (5,), (5,), (5,), (4, 5, 1, 1)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.requires_grad_(place not in frozen) for place, tensor in enumerate(tensors)]


def _call(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    one, two, mean, scale, shift, weight = tensors
    return norm_conv([one, two], mean, scale, shift, True, weight, None, _WINDOW, True)


def _gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    outputs = _call(tensors)
    loss = sum((output * (place + 1)).square().sum() for place, output in enumerate(outputs))
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return list(torch.autograd.grad(loss, wanted))


@pytest.mark.parametrize("frozen", [(), (0,), (0, 1), (2, 3, 4), (5,), (1, 4)])
def test_the_op_and_the_direct_call_agree_to_the_bit(frozen: tuple[int, ...]) -> None:
    tensors = _tensors(frozen)
    directly = [*_call(tensors), *_gradients(tensors)]
    with _Seen() as seen:
        watched = [*_call(tensors), *_gradients(tensors)]
    assert any("shoal.norm_conv." in name for name in seen.names)
    assert any("shoal.norm_conv_backward." in name for name in seen.names)
    for ours, theirs in zip(directly, watched, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_without_a_watcher_the_op_is_not_called() -> None:
    tensors = _tensors()
    with torch.profiler.profile() as profile:
        _gradients(tensors)
    assert not any("shoal::" in event.name for event in profile.events())


def test_what_needs_no_gradient_has_none() -> None:
    with torch.no_grad():
        assert all(not output.requires_grad for output in _call(_tensors()))
    assert all(not output.requires_grad for output in _call(_tensors(frozen=(0, 1, 2, 3, 4, 5))))


def test_a_capture_sees_the_op() -> None:
    tensors = [tensor.detach() for tensor in _tensors()]
    graph = make_fx(lambda *given: _call(list(given)), tracing_mode="fake")(*tensors).graph
    assert torch.ops.shoal.norm_conv.default in [node.target for node in graph.nodes]


def test_a_compiler_sees_the_op() -> None:
    targets: list[object] = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        targets.extend(node.target for node in module.graph.nodes)
        return module.forward

    tensors = _tensors()
    found = torch.compile(lambda *given: _call(list(given)), backend=backend, fullgraph=True)(*tensors)
    assert torch.ops.shoal.norm_conv in targets or torch.ops.shoal.norm_conv.default in targets
    torch.testing.assert_close(found[0], _call(tensors)[0], rtol=0, atol=0)


@pytest.mark.parametrize("watched", [False, True])
def test_a_second_derivative_is_refused(watched: bool) -> None:
    tensors = _tensors()
    with _Seen() if watched else nullcontext():
        y = _call(tensors)[0]
    with raising(InputError, "create_graph"):
        torch.autograd.grad(y.sum(), tensors[0], create_graph=True)
