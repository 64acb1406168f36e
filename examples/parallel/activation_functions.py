"""The exchanges of model-parallel layers as autograd functions: each sends forward what its adjoint sends backward.

| function | forward | backward | where |
|---|---|---|---|
| `gathered` | gather | sum back to the owners | sharded input of a column-parallel layer |
| `summed_in_backward` | nothing | sum over all ranks | replicated input of a column-parallel layer |
| `replicated` | gather | the own share | sharded result that all ranks go on with alike |
| `own_share` | the own share | gather | replicated input of a row-parallel layer |
| `summed` | sum over all ranks | nothing | result of a row-parallel layer, replicated |
| `summed_to_shares` | sum to the owners | gather | result of a row-parallel layer, sharded |

Megatron's f and g are `summed_in_backward` and `summed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from examples.parallel.activation_exchange import ActivationExchange
from examples.parallel.shares import Share


def gathered(
    x: torch.Tensor,
    exchange: ActivationExchange,
    dim: int,
    have: Sequence[Share],
    need: Sequence[Share] | None = None,
    *,
    what: str,
) -> torch.Tensor:
    """`exchange.gather`, for ranks that each do something else with what they get."""
    return _Gathered.apply(x, exchange, dim, have, need, what)


def summed_in_backward(x: torch.Tensor, exchange: ActivationExchange, *, what: str) -> torch.Tensor:
    """`x`, the same on all ranks; its gradient is the sum over the ranks."""
    return _SummedInBackward.apply(x, exchange, what)


def replicated(
    x: torch.Tensor, exchange: ActivationExchange, dim: int, have: Sequence[Share], *, what: str
) -> torch.Tensor:
    """`exchange.gather`, for ranks that all do the same with it, so that each has the whole gradient."""
    return _Replicated.apply(x, exchange, dim, have, what)


def own_share(
    x: torch.Tensor, exchange: ActivationExchange, dim: int, have: Sequence[Share], *, what: str
) -> torch.Tensor:
    """This rank's share of `x`, which is the same on all ranks; its gradient is gathered."""
    return _OwnShare.apply(x, exchange, dim, have, what)


def summed(x: torch.Tensor, exchange: ActivationExchange, *, what: str) -> torch.Tensor:
    """`exchange.all_sum`, for ranks that all do the same with it."""
    return _Summed.apply(x, exchange, what)


def summed_to_shares(
    x: torch.Tensor, exchange: ActivationExchange, dim: int, have: Sequence[Share], *, what: str
) -> torch.Tensor:
    """This rank's share of the sum over the ranks."""
    return _SummedToShares.apply(x, exchange, dim, have, what)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        exchange: ActivationExchange,
        dim: int,
        have: Sequence[Share],
        need: Sequence[Share] | None,
        what: str,
    ) -> torch.Tensor:
        ctx.exchange, ctx.route, ctx.what = exchange, (dim, have, need), what
        return exchange.gather(x, dim, have, need, what=what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = ctx.exchange.sum_back(grad, *ctx.route, what=f"{ctx.what}, backward")
        return back, None, None, None, None, None


class _SummedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: ActivationExchange, what: str) -> torch.Tensor:
        ctx.exchange, ctx.what = exchange, what
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.exchange.all_sum(grad, what=f"{ctx.what}, backward"), None, None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, exchange: ActivationExchange, dim: int, have: Sequence[Share], what: str
    ) -> torch.Tensor:
        ctx.dim, ctx.share = dim, have[exchange.rank]
        return exchange.gather(x, dim, have, what=what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        start, stop = ctx.share
        return grad.narrow(ctx.dim, start, stop - start), None, None, None, None


class _OwnShare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, exchange: ActivationExchange, dim: int, have: Sequence[Share], what: str
    ) -> torch.Tensor:
        ctx.exchange, ctx.route, ctx.what = exchange, (dim, have), what
        start, stop = have[exchange.rank]
        return x.narrow(dim, start, stop - start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.exchange.gather(grad, *ctx.route, what=f"{ctx.what}, backward"), None, None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: ActivationExchange, what: str) -> torch.Tensor:
        return exchange.all_sum(x, what=what).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None


class _SummedToShares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, exchange: ActivationExchange, dim: int, have: Sequence[Share], what: str
    ) -> torch.Tensor:
        ctx.exchange, ctx.route, ctx.what = exchange, (dim, have), what
        return exchange.sum_back(x, dim, have, what=what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.exchange.gather(grad, *ctx.route, what=f"{ctx.what}, backward"), None, None, None, None
