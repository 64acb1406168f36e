"""Dense layers on 1/N of every rank's batch at a time, while the next 1/N is exchanged.

Dettmers 2016, section 2.4, after Krizhevsky 2014. With N ranks there are N rounds. In round k every rank has the k-th
part of all ranks' batches; all compute their share of the layers for it. A thread encodes, exchanges and decodes what
round k + 1 needs at the same time; in the backward pass likewise, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from examples.parallel.activation_exchange import ActivationExchange
from examples.parallel.dense_layers import DenseLayers
from examples.parallel.shares import Share, in_order, shares
from shoal.errors import ShoalError, TransferError

_COUNT_BYTES = 8


@dataclass
class _Round:
    """One sub-batch, from its forward to its backward pass.

    Attributes:
        mine: rows of this rank's batch.
        rows: whose rows are where in the sub-batch.
        x: all input features, `y` this rank's share of the result, joined by their graph.
    """

    mine: Share
    rows: tuple[Share, ...]
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class _Pass:
    """One forward pass that waits for its backward pass."""

    rounds: list[_Round]
    leaves: list[torch.Tensor] = field(default_factory=list)


class SubBatches:
    """The model-parallel part of a hybrid network, in rounds.

    Args:
        layers: this rank's part of them.
        ahead: exchanges what goes into and comes out of the layers, from a thread of its own.
    """

    def __init__(self, layers: DenseLayers, ahead: ActivationExchange) -> None:
        self.layers = layers
        self.ahead = ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-sub-batches")
        self._failure: BaseException | None = None
        self._counts: Future[list[int]] | None = None

    def announce(self, rows: int) -> None:
        """Send all ranks how many rows come; before the convolutions, so that nobody waits for it."""
        self._counts = self._submit(self._count, rows)

    def __call__(self, h: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The last dense layer's output for this rank's rows.

        Args:
            h: (rows, ...) input of the first dense layer, of as many rows as were announced.
            parameters: this rank's parts of the layers' parameters.

        The parameters' gradients are means over the ranks, as DistributedDataParallel gives them; that of `h` is of
        this rank's own loss.
        """
        record = torch.is_grad_enabled() and (h.requires_grad or any(one.requires_grad for one in parameters))
        try:
            return _SubBatches.apply(self, record, h, *parameters)
        except ShoalError:
            raise
        except BaseException as error:
            self.give_up(error)
            raise

    def forward(self, h: torch.Tensor, parameters: Sequence[torch.Tensor], record: bool) -> tuple[torch.Tensor, _Pass]:
        arriving = list(self._gathers(h))
        done = _Pass([], [one.detach().requires_grad_(record and one.requires_grad) for one in parameters])
        drawn = self.layers.drawn(h.device)
        leaving = []
        for mine, rows, job in arriving:
            x = job.result()
            with torch.set_grad_enabled(record):
                y = self.layers(x.requires_grad_(record and h.requires_grad), done.leaves, drawn)
            done.rounds.append(_Round(mine, rows, x, y))
            leaving.append(self._to_rows(y, rows))
        return torch.cat([job.result() for job in leaving]), done

    def backward(self, done: _Pass, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of `h` and of the parameters; None for what needs none."""
        grad = grad.contiguous()
        arriving = [self._to_features(grad[slice(*one.mine)], one.rows) for one in done.rounds]
        wanted = [leaf for leaf in done.leaves if leaf.requires_grad]
        into_h = done.rounds[0].x.requires_grad
        sums: list[torch.Tensor] = []
        leaving = []
        while done.rounds:
            one, job = done.rounds.pop(0), arriving.pop(0)
            inputs = [*wanted, one.x] if into_h else wanted
            found = list(torch.autograd.grad(one.y, inputs, job.result()))
            if into_h:
                leaving.append(self._to_owners(found.pop(), one.rows))
            sums = list(torch._foreach_add(sums, found)) if sums else found
        mean = iter(torch._foreach_div(sums, float(self.ahead.ranks)) if sums else [])
        of_h = torch.cat([job.result() for job in leaving]) if into_h else None
        return [of_h, *(next(mean) if leaf.requires_grad else None for leaf in done.leaves)]

    def train(
        self,
        h: torch.Tensor,
        parameters: Callable[[], Sequence[torch.Tensor]],
        loss_of: Callable[[torch.Tensor, Share], torch.Tensor],
        after_round: Callable[[list[torch.Tensor | None]], None],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Each sub-batch forward and backward before the next, which is under way at the same time.

        Args:
            h: (rows, ...) input of the first dense layer, of as many rows as were announced.
            parameters: gives this rank's parts of the layers' parameters, as they are when a round begins.
            loss_of: from the last layer's output for this rank's rows of a round, and which rows these are, to their
                part of this rank's loss.
            after_round: takes a round's part of the parameters' gradients, means over the ranks.

        Returns:
            This rank's loss, and the gradient of `h`.
        """
        gathers = self._gathers(h)
        drawn = self.layers.drawn(h.device)
        losses, leaving = [], []
        coming = next(gathers, None)
        while coming is not None:
            mine, rows, job = coming
            x = job.result().requires_grad_(h.requires_grad)
            coming = next(gathers, None)
            leaves = [one.detach().requires_grad_(one.requires_grad) for one in parameters()]
            with torch.enable_grad():
                y = self.layers(x, leaves, drawn)
                out = self._to_rows(y, rows).result().requires_grad_()
                losses.append(loss_of(out, mine))
            (of_out,) = torch.autograd.grad(losses[-1], out)
            losses[-1] = losses[-1].detach()
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            inputs = [*wanted, x] if h.requires_grad else wanted
            found = list(torch.autograd.grad(y, inputs, self._to_features(of_out.contiguous(), rows).result()))
            if h.requires_grad:
                leaving.append(self._to_owners(found.pop(), rows))
            mean = iter(torch._foreach_div(found, float(self.ahead.ranks)) if found else [])
            after_round([next(mean) if leaf.requires_grad else None for leaf in leaves])
        return sum(losses[1:], losses[0]), torch.cat([job.result() for job in leaving]) if leaving else None

    def give_up(self, error: BaseException) -> None:
        """Notify the other ranks, which would wait for this one."""
        reason = f"rank {self.ahead.rank} stopped in its dense layers: {type(error).__name__}: {error}"
        self.ahead.exchange.give_up(reason)
        self.layers.activations.exchange.give_up(reason)

    def stop(self, error: BaseException) -> None:
        """After an error between `announce` and the dense layers: the ranks' channel knows best whether one was lost.

        Raises:
            TransferError: one was. Otherwise the error is this rank's own, and the others are notified.
        """
        if self._counts is not None:
            try:
                self._counts.result()
            except TransferError as lost:
                raise lost from error
        self.give_up(error)

    def close(self) -> None:
        """End the thread; jobs that have not begun are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _gathers(self, h: torch.Tensor) -> Iterator[tuple[Share, tuple[Share, ...], Future[torch.Tensor]]]:
        """For each round: this rank's rows, whose rows are where in it, and its input on the way."""
        counts = self._announced(h)
        cuts = [shares(count, self.ahead.ranks) for count in counts]
        for place in range(self.ahead.ranks):
            rows = in_order([stop - start for start, stop in (cut[place] for cut in cuts)])
            mine = cuts[self.ahead.rank][place]
            part = h.detach()[slice(*mine)]
            yield mine, rows, self._submit(self.ahead.gather, part, 0, rows, what="input of the dense layers")

    def _to_rows(self, y: torch.Tensor, rows: tuple[Share, ...]) -> Future[torch.Tensor]:
        """From this rank's features of all rows to all features of its rows."""
        features, what = self.layers.out_shares, "output of the dense layers"
        return self._submit(self.ahead.transpose, y.detach(), 0, rows, 1, features, what=what)

    def _to_features(self, grad: torch.Tensor, rows: tuple[Share, ...]) -> Future[torch.Tensor]:
        features, what = self.layers.out_shares, "output of the dense layers, backward"
        return self._submit(self.ahead.transpose, grad, 1, features, 0, rows, what=what)

    def _to_owners(self, grad: torch.Tensor, rows: tuple[Share, ...]) -> Future[torch.Tensor]:
        return self._submit(self.ahead.sum_back, grad, 0, rows, what="input of the dense layers, backward")

    def _announced(self, h: torch.Tensor) -> list[int]:
        assert self._counts is not None
        counts, self._counts = self._counts.result(), None
        if counts[self.ahead.rank] != len(h):
            raise TransferError(
                f"got {len(h)} rows before the dense layers, expected {counts[self.ahead.rank]} as images went in; "
                "keep the batch in the first dimension"
            )
        return counts

    def _count(self, rows: int) -> list[int]:
        sizes = [_COUNT_BYTES] * self.ahead.ranks
        count = rows.to_bytes(_COUNT_BYTES, "little")
        counts = self.ahead.exchange.all_gather_bytes(count, sizes, what="rows of the batch")
        return [int.from_bytes(one, "little") for one in counts]

    def _submit(self, job: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        stream = torch.accelerator.current_stream() if torch.cuda.is_initialized() else None

        def run() -> Any:
            # One failed exchange spends the channel: what comes after it would only wait for its time to be up.
            if self._failure is not None:
                raise self._failure
            try:
                if stream is None:
                    return job(*arguments, **named)
                with stream:
                    return job(*arguments, **named)
            except BaseException as error:
                self._failure = error
                raise

        return self._thread.submit(run)


class _SubBatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounds: SubBatches, record: bool, h: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        y, done = rounds.forward(h, parameters, record)
        ctx.rounds, ctx.done = rounds, done if record else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        done, ctx.done = ctx.done, None
        if done is None:
            raise TransferError("got a second backward pass through the dense layers; run the forward pass again")
        try:
            return None, None, *ctx.rounds.backward(done, grad)
        except ShoalError:
            raise
        except BaseException as error:
            ctx.rounds.give_up(error)
            raise
