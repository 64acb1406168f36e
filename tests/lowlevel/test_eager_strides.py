"""While `eager_strides` is on, fake tensors have the strides of real ones, whatever their operands' layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.lowlevel import eager_strides as module
from shoal.lowlevel.eager_strides import eager_strides, iterated_strides

aten = torch.ops.aten
SHAPES = [(2, 8, 4, 4), (1, 8, 4, 4), (2, 8, 1, 1)]


def layouts(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Tensors of one shape: contiguous, channels_last, with axes swapped, expanded, cut out."""
    yield torch.randn(shape)
    yield torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    yield torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
    yield torch.randn(*shape[:2], *[1] * (len(shape) - 2)).expand(shape)
    yield torch.randn(*shape[:-1], shape[-1] + 1)[..., :-1]


def strides(result: Any) -> list[tuple[int, ...]]:
    return [value.stride() for value in (result if isinstance(result, tuple) else (result,))]


def departures(op: OpOverload, n_tensors: int, make: Callable[..., Any], correcting: Any = eager_strides) -> list[str]:
    """What the trace says otherwise than the kernel, over the layouts of `n_tensors` tensors that `make` makes the op's
    arguments of."""
    found = []
    cases = (case for shape in SHAPES for case in itertools.product(layouts(shape), repeat=n_tensors))
    every = [make(*case) for case in cases]
    reals = [strides(op(*arguments)) for arguments in every]
    with correcting(), FakeTensorMode() as mode:
        fakes = [
            strides(op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments)))
            for arguments in every
        ]
    for arguments, fake, real in zip(every, fakes, reals, strict=True):
        if fake != real:
            operands = [(tuple(a.shape), a.stride()) for a in arguments if isinstance(a, torch.Tensor)]
            found.append(f"{op} of {operands}: traced {fake}, real {real}")
    return found


UNARY: dict[OpOverload, tuple[Any, ...]] = {
    **dict.fromkeys(
        (aten.relu.default, aten.silu.default, aten.gelu.default, aten.sigmoid.default, aten.neg.default), ()
    ),
    **dict.fromkeys((aten.hardswish.default, aten.mish.default, aten.exp.default, aten.zeros_like.default), ()),
    **dict.fromkeys((aten.log_sigmoid_forward.default, aten.clone.default), ()),
    **dict.fromkeys(
        (aten.mul.Scalar, aten.add.Scalar, aten.ne.Scalar, aten.mul.Tensor, aten.pow.Tensor_Scalar), (2.0,)
    ),
    **dict.fromkeys((aten.hardtanh.default, aten.clamp.default), (0.0, 6.0)),
    aten._log_softmax.default: (1, False),
    aten.roll.default: ([1], [1]),
}
BACKWARD: dict[OpOverload, tuple[Any, ...]] = {
    **dict.fromkeys(
        (aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.silu_backward.default), ()
    ),
    **dict.fromkeys((aten.mish_backward.default, aten.add.Tensor), ()),
    aten.hardtanh_backward.default: (0.0, 6.0),
    aten.threshold_backward.default: (0,),
    aten.leaky_relu_backward.default: (0.1, False),
    aten.softplus_backward.default: (1.0, 20.0),
    aten._log_softmax_backward_data.default: (1, torch.float32),
}


@pytest.mark.parametrize("op", UNARY, ids=str)
def test_ops_of_one_tensor(op: OpOverload) -> None:
    assert departures(op, 1, lambda x: (x, *UNARY[op])) == []


@pytest.mark.parametrize("op", BACKWARD, ids=str)
def test_ops_of_two_tensors_whatever_their_order_in_the_kernel(op: OpOverload) -> None:
    assert departures(op, 2, lambda grad, x: (grad, x, *BACKWARD[op])) == []


def test_ops_whose_tensors_stand_elsewhere() -> None:
    assert departures(aten.elu_backward.default, 2, lambda grad, x: (grad, 1.0, 1.0, 1.0, False, x)) == []
    assert departures(aten.native_dropout_backward.default, 2, lambda grad, x: (grad, x > 0, 2.0)) == []
    assert departures(aten.where.self, 2, lambda x, y: (x > 0, y, x)) == []


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_gradients_of_losses(name: str) -> None:
    op, more = getattr(aten, f"{name}_backward").default, () if name == "mse_loss" else (1.0,)
    mean = torch.tensor(1.0)
    assert departures(op, 2, lambda x, y: (mean, x, y, 1, *more)) == []
    assert departures(op, 3, lambda grad, x, y: (grad, x, y, 0, *more)) == []
    assert departures(op, 2, lambda x, y: (mean, x, y, 1, *more), nullcontext) != []


def test_a_loss_of_each_element() -> None:
    op = aten.binary_cross_entropy.default
    assert departures(op, 2, lambda x, y: (x.sigmoid(), y.sigmoid(), None, 0)) == []


@pytest.mark.parametrize("mode", ["reflection", "replication"])
@pytest.mark.parametrize("dims", [2, 3])
def test_padding_by_what_is_inside(mode: str, dims: int) -> None:
    pad, back = (getattr(aten, f"{mode}_pad{dims}d{name}").default for name in ("", "_backward"))
    x = torch.randn(2, 3, *range(4, 4 + dims))
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    around = [1] * (2 * dims)
    for one in (x, x.to(memory_format=layout)):
        padded = pad(one, around)
        for grad in (padded.contiguous(), padded.contiguous(memory_format=layout)):
            with eager_strides(), FakeTensorMode() as fakes:
                fake_x, fake_grad = map(fakes.from_tensor, (one, grad))
                fake, fake_back = pad(fake_x, around), back(fake_grad, fake_x, around)
            assert strides((fake, fake_back)) == strides((padded, back(grad, one, around)))


def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1])


def test_norms() -> None:
    pixels = torch.randn(1, 64, 8).transpose(1, 2).view(1, 8, 8, 8)  # channels_last, but for the stride between images
    for x in (pixels, pixels.unsqueeze(2)):
        arguments = x, ones(x), ones(x), True, 0.1, 1e-5
        with eager_strides(), FakeTensorMode() as mode:
            fake = aten._native_batch_norm_legit.no_stats(
                mode.from_tensor(x), *map(mode.from_tensor, arguments[1:3]), *arguments[3:]
            )
        assert strides(fake) == strides(aten._native_batch_norm_legit.no_stats(*arguments))
    assert departures(aten._native_batch_norm_legit.no_stats, 1, lambda x: (x, ones(x), ones(x), True, 0.1, 1e-5)) == []
    assert departures(aten.native_layer_norm.default, 1, lambda x: (x, [x.shape[-1]], None, None, 1e-5)) == []
    found = departures(
        aten.native_batch_norm_backward.default,
        2,
        lambda grad, x: (grad, x, ones(x), None, None, ones(x), ones(x), True, 1e-5, [True] * 3),
    )
    assert [text for text in found if "(2, 8, 1, 1)" not in text] == []  # which no kernel after it can tell apart


def test_views_of_an_axis_of_one() -> None:
    def pixels(x: torch.Tensor) -> tuple[Any, ...]:
        n, c, *sides = x.shape
        return x.reshape(n, c, -1).transpose(1, 2).contiguous().transpose(1, 2), [n, c, *sides]

    assert departures(aten.view.default, 1, pixels) == []
    assert departures(aten.view.default, 1, pixels, nullcontext) != []


@pytest.mark.parametrize("op", [aten.hardtanh_backward.default, aten.threshold_backward.default], ids=str)
def test_without_it_pytorch_s_fake_kernels_still_say_otherwise(op: OpOverload) -> None:
    """Where this fails PyTorch has mended them: take the op out of the table."""
    arguments = BACKWARD[op]
    assert departures(op, 2, lambda grad, x: (grad, x, *arguments), nullcontext) != []


def test_three_operands_decide_one_after_another() -> None:
    for shape in SHAPES:
        for x, y, z in itertools.product(layouts(shape), repeat=3):
            assert iterated_strides(x, y, z) == torch.addcmul(x, y, z).stride()
            assert iterated_strides(x[:, :1], y, z[:1]) == torch.addcmul(x[:, :1], y, z[:1]).stride()


def test_dtype_and_values_of_the_step_are_not_touched_and_others_trace_as_they_did() -> None:
    grad, x = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    dispatch = FakeTensorMode._dispatch_impl

    def traced() -> torch.Tensor:
        with FakeTensorMode() as mode:
            halves = (mode.from_tensor(value).bfloat16() for value in (grad, x))
            result: torch.Tensor = aten.hardtanh_backward(*halves, 0.0, 6.0)
            return result

    before = traced().stride()
    with pytest.raises(ZeroDivisionError), eager_strides():
        inside = traced()
        assert inside.dtype == torch.bfloat16 and inside.stride() == grad.stride() != before
        print(1 // 0)
    assert traced().stride() == before and FakeTensorMode._dispatch_impl is dispatch
    assert module._rule(aten.convolution.default) is None


def test_what_ops_return_is_found_again_in_a_later_trace_and_only_inside() -> None:
    grad, x = torch.randn(3, 5, 7, 9), torch.randn(3, 5, 7, 9).to(memory_format=torch.channels_last)

    def traced() -> tuple[tuple[int, ...], bool]:
        """The strides, and whether they were computed."""
        before = FakeTensorMode.cache_misses
        with FakeTensorMode() as mode:
            result = aten.hardtanh_backward(mode.from_tensor(grad), mode.from_tensor(x), 0.0, 6.0)
        return result.stride(), FakeTensorMode.cache_misses > before

    def traced_inside() -> tuple[tuple[int, ...], bool]:
        with eager_strides():
            return traced()

    ours, theirs = grad.stride(), x.stride()
    assert [traced(), traced_inside()] == [(theirs, True), (ours, True)]
    assert [traced(), traced_inside()] == [(theirs, False), (ours, False)]


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_what_depends_on_more_than_the_layout_is_computed_each_time(order: tuple[bool, bool]) -> None:
    """`empty_like(x).bernoulli_(p)`, made functional, lies in memory as `x` does; of another tensor it does not."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for traces in ([order], [order[:1], order[1:]]):  # in one trace, and in two
        for some in traces:
            with eager_strides(), FakeTensorMode() as mode:
                fake = mode.from_tensor(x)
                for unwritten in some:
                    drawn = aten.bernoulli.p(aten.empty_like(fake) if unwritten else aten.sigmoid(fake), 0.5)
                    assert (drawn.stride() == x.stride()) == unwritten


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


NORMS: dict[str, tuple[Any, Any]] = {  # of (2, 3, 4, 3) and a weight of three
    "batch": (aten._native_batch_norm_legit.no_stats, lambda x, weight: (x, weight, weight, True, 0.1, 1e-5)),
    "frozen batch": (
        aten._native_batch_norm_legit_no_training.default,
        lambda x, weight: (x, weight, weight, *[torch.ones(3, dtype=_wide(x.dtype))] * 2, 0.1, 1e-5),
    ),
    "layer": (aten.native_layer_norm.default, lambda x, weight: (x, [3], weight, weight, 1e-5)),
    "group": (aten.native_group_norm.default, lambda x, weight: (x, weight, weight, 2, 3, 12, 1, 1e-5)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_of_a_norm_have_the_dtype_that_its_kernel_saves(
    norm: str, dtype: torch.dtype, weighted: bool
) -> None:
    x = torch.randn(2, 3, 4, 3).to(dtype)
    weight = torch.ones(3, dtype=_wide(dtype)) if weighted else None
    op, arguments = NORMS[norm]
    given = arguments(x, weight)
    real = op(*given)
    with eager_strides(), FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in given))
    assert [value.dtype for value in fake] == [value.dtype for value in real]


@pytest.mark.parametrize("view", [lambda x: x[:, :-1], lambda x: x[:, 0], lambda x: x[0], lambda x: x[-1], lambda x: x])
@pytest.mark.parametrize(
    "write",
    [
        lambda x, value: aten.slice_scatter(x, value(*x.shape[:-1], 2), x.dim() - 1, 1, 3),
        lambda x, value: aten.select_scatter(x, value(*x.shape[:-1]), x.dim() - 1, 1),
        lambda x, value: aten.diagonal_scatter(x, value(*torch.empty(x.shape).diagonal().shape)),
        lambda x, value: aten.as_strided_scatter(x, value(2), [2], [1], x.storage_offset()),
        lambda x, value: aten.copy(x, value(x.shape[-1])),
    ],
    ids=["slice", "select", "diagonal", "as strided", "copy"],
)
def test_writing_into_a_view_copies_all_of_its_storage(
    view: Callable[[torch.Tensor], torch.Tensor], write: Callable[[torch.Tensor, Callable[..., Any]], torch.Tensor]
) -> None:
    real = write(view(torch.zeros(3, 4, 5)), torch.ones)
    for _ in range(2):  # the second time PyTorch would recall the first
        with eager_strides(), FakeTensorMode():
            fake = write(view(torch.zeros(3, 4, 5)), torch.ones)
        assert (fake.stride(), fake.storage_offset()) == (real.stride(), real.storage_offset())
        assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()
