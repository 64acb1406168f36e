"""Every op that Shoal registers returns what its fake kernel says: shape, dtype, bytes, and strides of any input.

Along an axis of one element any stride leads to the same address, so there it may be any.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import shoal  # noqa: F401  (registers the ops)
from shoal.kernels.memory_format import channels_last_format, is_same_order
from shoal.kernels.norm.norm_act import activated
from shoal.kernels.norm.norm_operands import NormAffine

OPS: Any = torch.ops.shoal
Arguments = tuple[Any, ...]


class Draw(random.Random):
    """One example: shapes, dtypes and layouts."""

    def __init__(self, seed: int, dims: tuple[int, ...] = (3, 4, 5)) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)
        self.shape = [
            self.choice([1, 2, 3]),
            self.choice([1, 2, 4]),
            *(self.choice([1, 2, 5]) for _ in range(self.choice(dims) - 2)),
        ]
        self.channels = self.shape[1]
        self.dtype = self.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
        self.wide = torch.promote_types(self.dtype, torch.float32)

    def tensor(self, *shape: int) -> torch.Tensor:
        """Contiguous, channels_last, of permuted axes, a slice, expanded, or every second element of a row."""
        sizes, dims = list(shape or self.shape), len(shape or self.shape)
        kind = self.choice(["contiguous", "last", "permuted", "slice", "expanded", "strided"])
        axis = self.randrange(dims)
        whole = list(sizes)
        if kind == "permuted":
            axes = self.sample(range(dims), dims)
            return self._randn([sizes[one] for one in axes]).permute([axes.index(one) for one in range(dims)])
        if kind == "slice":
            whole[axis] += 2
            return self._last(self._randn(whole)).narrow(axis, 1, sizes[axis])
        if kind == "expanded":
            whole[axis] = 1
            return self._randn(whole).expand(sizes)
        if kind == "strided":
            whole[-1] *= 2
            return self._randn(whole)[..., ::2]
        return self._last(self._randn(whole)) if kind == "last" else self._randn(whole)

    def vector(self, channels: int | None = None) -> torch.Tensor:
        """One positive value a channel, in the dtype of statistics."""
        return torch.rand(self.channels if channels is None else channels, dtype=self.wide) + 0.5

    def maybe(self, value: Any) -> Any:
        return self.choice([None, value])

    def weight(self, n_in: int, n_out: int, dims: int) -> torch.Tensor:
        found = self._randn([n_out, n_in, *[self.choice([1, 3])] * (dims - 2)])
        return self._last(found) if self.random() < 0.5 else found

    def _last(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=channels_last_format(x.dim())) if x.dim() in (4, 5) else x

    def _randn(self, shape: list[int]) -> torch.Tensor:
        return torch.randn(shape).to(self.dtype)


def _activation(draw: Draw) -> str:
    return draw.choice(["", "relu", "elu 1.0", "leaky_relu 0.1"])


def _inverted(draw: Draw, op: Any) -> tuple[Arguments, Arguments]:
    """Arguments of an inverted norm, and those of its backward pass."""
    vectors = tuple(draw.maybe(draw.vector().to(draw.dtype)) for _ in range(2))
    options = 1e-5, draw.choice(["leaky_relu", "elu", "identity"]), 0.1
    if op is OPS.inverted_norm:
        forward: Arguments = (draw.tensor(), *vectors, 1, *options)
        y, _, invstd = op(*forward)
        return forward, (draw.tensor(), y, *vectors, invstd, *options[1:])
    statistics = draw.choice([(None, None), (draw.vector(), draw.vector())])
    forward = (draw.tensor(), *vectors, *statistics, *options)
    y, _, variance = op(*forward)
    return forward, (draw.tensor(), y, *vectors, torch.rsqrt(variance), statistics[0] is not None, *options)


def _norm_act(draw: Draw) -> tuple[Arguments, Arguments]:
    xs = [draw.tensor() for _ in range(draw.choice([1, 2]))]
    n = len(xs) * draw.channels
    whole = [draw.shape[0], n, *draw.shape[2:]]
    vectors, relu = [draw.vector(n) for _ in range(3)], draw.random() < 0.5
    forward: Arguments = (xs, *vectors, draw.maybe(draw.tensor(*whole)), relu)
    adds = relu and forward[4] is not None
    needs = [draw.random() < 0.7, draw.random() < 0.7, adds]
    z = OPS.norm_act(*forward) if adds else None
    return forward, (draw.tensor(*whole), xs, *vectors, z, relu, needs, *_own(draw, n))


def _own(draw: Draw, channels: int) -> Arguments:
    """A variance and eps, or neither."""
    return draw.choice([(), (draw.vector(channels).square(), 1e-5)])


def _norm_conv(draw: Draw) -> tuple[Arguments, Arguments]:
    xs = [draw.tensor() for _ in range(draw.choice([1, 2]))]
    n_in, n_out, dims = len(xs) * draw.channels, draw.choice([1, 3, 8]), len(draw.shape)
    weight, statistics = draw.weight(n_in, n_out, dims), draw.random() < 0.5
    vectors = draw.choice([[None] * 3, [draw.vector(n_in) for _ in range(3)]])
    window = [draw.choice([1, 2])] * (dims - 2), [weight.shape[2] // 2] * (dims - 2), [1] * (dims - 2), 1
    head: Arguments = (xs, *vectors, draw.random() < 0.5, weight)
    bias = draw.maybe(draw.vector(n_out).to(draw.dtype))
    y, mean, _ = OPS.norm_conv(*head, bias, *window, statistics)
    of_statistics = (draw.vector(n_out), draw.vector(n_out)) if statistics else (None, None)
    needs = [draw.random() < 0.7, vectors[0] is not None, draw.random() < 0.7, bias is not None]
    written = (y, mean) if statistics else (None, None)
    backward = (draw.tensor(*y.shape), *of_statistics, xs, *written, *vectors, *head[4:], *window, needs)
    if vectors[0] is not None and _own(draw, 1):
        backward = *backward, None, None, draw.vector(n_in).square(), 1e-5
    return (*head, bias, *window, statistics), backward


def _dense_block(draw: Draw) -> tuple[Arguments, Arguments]:
    x, steps, growth = draw.tensor(), draw.choice([1, 2]), draw.choice([1, 4])
    parameters: list[torch.Tensor] = []
    for layer in range(2):
        n_in = draw.channels + layer * growth
        for n_out in [8, growth][-steps:]:
            vectors = [draw.vector(n_in).to(draw.dtype) for _ in range(2)]
            parameters += [*vectors, draw.weight(n_in, n_out, len(draw.shape))]
            n_in = n_out
    eps, relu = [1e-5] * (2 * steps), [draw.random() < 0.5 for _ in range(2 * steps)]
    forward = x, *draw.choice([(None, None), (draw.vector(), draw.vector())]), parameters, eps, relu, steps
    features, means, variances, *inner = OPS.dense_block(*forward)
    n = features.shape[1]
    of_features = draw.maybe(draw.tensor(*features.shape))
    of_statistics = draw.choice([(None, None), (draw.vector(n), draw.vector(n))])
    saved = features, means, variances, inner, parameters
    return forward, (of_features, *of_statistics, *saved, eps, relu, steps, forward[1] is None)


CASES: Mapping[str, Callable[[Draw], Arguments]] = {
    "statistics": lambda d: (d.tensor(),),
    "statistics_backward": lambda d: (d.vector(), d.vector(), d.tensor(), d.vector()),
    "cumulative_statistics": lambda d: (d.tensor(), d.vector(), d.vector(), torch.tensor(3)),
    "moved_statistics": lambda d: (*(d.vector() for _ in range(4)), d.maybe(torch.tensor(3)), 0.1, 7),
    "batch_norm_scale": lambda d: (d.vector(), d.maybe(d.vector()), 1e-5),
    "batch_norm_scale_backward": lambda d: (d.vector(), d.vector(), d.maybe(d.vector()), 1e-5, [True, True]),
    "joined_statistics": lambda d: ([d.vector(), d.vector()], [d.vector(), d.vector()], [2, 3]),
    "joined_norm_gradients": lambda d: (
        *([d.vector(), d.vector()] for _ in range(2)),
        d.vector(),
        d.maybe(d.vector().to(d.dtype)),
        1e-5,
        7,
    ),
    "sliced_norm": lambda d: (d.tensor(), *(d.vector() for _ in range(3)), _activation(d)),
    "sliced_norm_sums": lambda d: (d.tensor(), d.tensor(), *(d.vector() for _ in range(3)), _activation(d)),
    "sliced_norm_gradient": lambda d: (d.tensor(), d.tensor(), *(d.vector() for _ in range(5)), _activation(d)),
    "inverted_norm": lambda d: _inverted(d, OPS.inverted_norm)[0],
    "inverted_norm_backward": lambda d: _inverted(d, OPS.inverted_norm)[1],
    "inverted_batch_norm": lambda d: _inverted(d, OPS.inverted_batch_norm)[0],
    "inverted_batch_norm_backward": lambda d: _inverted(d, OPS.inverted_batch_norm)[1],
    "norm_act": lambda d: _norm_act(d)[0],
    "norm_act_backward": lambda d: _norm_act(d)[1],
    "norm_conv": lambda d: _norm_conv(d)[0],
    "norm_conv_backward": lambda d: _norm_conv(d)[1],
    "dense_block": lambda d: _dense_block(d)[0],
    "dense_block_backward": lambda d: _dense_block(d)[1],
}


def registered() -> Iterator[str]:
    names = torch._C._dispatch_get_all_op_names()
    return (name.removeprefix("shoal::") for name in names if name.startswith("shoal::"))


def test_every_op_is_held_to_it() -> None:
    assert set(registered()) == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_op_returns_what_its_fake_kernel_says(name: str) -> None:
    op = getattr(OPS, name)
    for seed in range(25):
        with torch.no_grad():
            arguments = CASES[name](Draw(seed))
            real, mode = tree_leaves(op(*arguments)), FakeTensorMode()
            as_fakes = tree_map(lambda x, m=mode: m.from_tensor(x) if isinstance(x, torch.Tensor) else x, arguments)
            with mode:
                fake = tree_leaves(op(*as_fakes))
        assert len(real) == len(fake), seed
        for place, (ours, said) in enumerate(zip(real, fake, strict=True)):
            at = f"result {place} of example {seed}: {ours.stride()} for {said.stride()}"
            assert (ours.shape, ours.dtype) == (said.shape, said.dtype), at
            assert is_same_order(ours, said.stride()), at
            assert ours.untyped_storage().nbytes() == said.untyped_storage().nbytes(), at


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_what_is_activated_is_laid_out_as_batch_norm_lays_out(normalised: bool, relu: bool) -> None:
    x = torch.empty_strided((3, 4, 2, 1), (8, 1, 4, 24), dtype=torch.float64).normal_()
    affine = NormAffine(*[torch.rand(4, dtype=x.dtype)] * 3) if normalised else None
    found = activated(x, affine, relu, x.dtype)
    assert found.stride() == (x if not (normalised or relu) else x.contiguous()).stride()
