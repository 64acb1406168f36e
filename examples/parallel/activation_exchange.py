"""Activations and their gradients between ranks, encoded: gather, sum back to the owners, transpose.

Each of these is linear up to the codec's rounding, and each has its adjoint here: `sum_back` is that of `gather`, and
`transpose` is its own with the dimensions exchanged. Whatever more than one rank reads is decoded from the same bytes
by all of them, its owner included, so that it is the same on all ranks bit for bit; what only its owner reads is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from examples.parallel.shares import Piece, Share, everything, pieces, shares
from shoal import codecs
from shoal.codecs import Codec, Encoded
from shoal.codecs.memory_order import strides_in_order
from shoal.distributed.comm.agreement import agree, described
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.traffic import Traffic
from shoal.errors import CodecError

FLOAT_BYTES = 4  # what plain PyTorch would have sent of each value


def activation_codec(codec: str | Codec | None) -> Codec | None:
    """The codec of this name, if its values can stand for activations.

    Raises:
        CodecError: there is none of this name, its error has no bound (`one_bit`: the paper, section 4.2), or it does
            not give values back.

    >>> print(activation_codec("linear"), activation_codec(None))
    linear(block=4096) None
    """
    found = codecs.get(codec) if isinstance(codec, str) else codec
    if found is None:
        return None
    if found.name in ("sign_mask", "pool_index"):
        raise CodecError(f"got {found.name} for activations, which does not give them back; take dynamic_tree")
    if found.properties.absolute_error >= 1:
        raise CodecError(
            f"got {found.name} for activations, whose errors are as large as they are; "
            "take dynamic_tree, and leave it to gradients of data parallel layers"
        )
    return found


class ActivationExchange:
    """What the ranks of a group send each other in model-parallel layers.

    Calls are collective, making one too: every rank makes the same ones in the same order, from one thread at a time.

    Args:
        exchange: between these ranks; only this object may use it.
        codec: of `shoal.codecs` that gives activations back; None: raw, exact.
        traffic: where the bytes are counted, as "activations"; None: an own one.

    Raises:
        CodecError: see `activation_codec`.
        TransferError: ranks have different codecs: on every one of them.
    """

    def __init__(
        self, exchange: Exchange, codec: str | Codec | None = "dynamic_tree", *, traffic: Traffic | None = None
    ) -> None:
        self.exchange = exchange
        self.codec = activation_codec(codec)
        self.traffic = Traffic() if traffic is None else traffic
        agree(exchange, "ActivationExchange", codec=described(self.codec))

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def ranks(self) -> int:
        return self.exchange.ranks

    def gather(
        self, x: torch.Tensor, dim: int, have: Sequence[Share], need: Sequence[Share] | None = None, *, what: str
    ) -> torch.Tensor:
        """What this rank needs, of all ranks' shares.

        Args:
            x: this rank's share along `dim`; the other sides are the same on all ranks.
            have, need: see `pieces`; no need: all of it.

        Returns:
            As `x` with `need[rank]` along `dim`; the same bits on every rank that reads them.
        """
        routed = pieces(have, everything(have) if need is None else need)
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        mine: dict[Piece, torch.Tensor] = {}
        raw_elems = 0
        for piece in routed:
            if piece.owner != self.rank:
                continue
            part = x.narrow(dim, piece.start - have[self.rank][0], piece.length)
            if not piece.travels:
                mine[piece] = part
                continue
            payload = self._encode(part)
            for reader in piece.readers:
                if reader != self.rank:
                    outgoing[reader].append(payload)
                    raw_elems += part.numel()
            if self.rank in piece.readers:
                mine[piece] = self._decode(payload, tuple(part.shape), x)
        arriving = [
            [piece for piece in routed if piece.owner == rank != self.rank and self.rank in piece.readers]
            for rank in range(self.ranks)
        ]
        shapes = [[_with(x.shape, dim, piece.length) for piece in found] for found in arriving]
        to_all = all(piece.readers == tuple(range(self.ranks)) for piece in routed)
        received = self._swap(outgoing, shapes, x, raw_elems, what, to_all=to_all)
        for found, parts in zip(arriving, received, strict=True):
            mine.update(zip(found, parts, strict=True))
        ordered = [mine[piece] for piece in routed if piece in mine]
        if not ordered:
            return x.new_empty(_with(x.shape, dim, 0))
        return torch.cat(ordered, dim)

    def sum_back(
        self, grad: torch.Tensor, dim: int, have: Sequence[Share], need: Sequence[Share] | None = None, *, what: str
    ) -> torch.Tensor:
        """The sum over the ranks, in their order, of what each has for this rank's share: the adjoint of `gather`.

        Args:
            grad: this rank's, for what it needed.
            have, need: as for `gather`.

        Returns:
            As `grad` with `have[rank]` along `dim`, summed in float32. What comes from others is rounded once, the own
            part is exact.
        """
        need = everything(have) if need is None else need
        routed = pieces(have, need)
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        raw_elems = 0
        for piece in routed:
            if self.rank in piece.readers and piece.owner != self.rank:
                part = grad.narrow(dim, piece.start - need[self.rank][0], piece.length)
                outgoing[piece.owner].append(self._encode(part))
                raw_elems += part.numel()
        mine = [piece for piece in routed if piece.owner == self.rank]
        arriving = [
            [piece for piece in mine if rank in piece.readers and rank != self.rank] for rank in range(self.ranks)
        ]
        shapes = [[_with(grad.shape, dim, piece.length) for piece in found] for found in arriving]
        received = self._swap(outgoing, shapes, grad, raw_elems, what)
        first, last = have[self.rank]
        total = grad.new_zeros(_with(grad.shape, dim, last - first), dtype=torch.float32)
        for rank in range(self.ranks):
            if rank == self.rank:
                for piece in mine:
                    if rank in piece.readers:
                        part = grad.narrow(dim, piece.start - need[rank][0], piece.length)
                        total.narrow(dim, piece.start - first, piece.length).add_(part)
            else:
                for piece, part in zip(arriving[rank], received[rank], strict=True):
                    total.narrow(dim, piece.start - first, piece.length).add_(part)
        return total.to(grad.dtype)

    def all_sum(self, x: torch.Tensor, *, what: str) -> torch.Tensor:
        """The sum of all ranks' tensors of one shape, the same bits on every rank: two roundings for any number."""
        if self.ranks == 1:
            return x
        have = shares(x.numel(), self.ranks)
        own = self.sum_back(x.reshape(-1), 0, have, what=what)
        return self.gather(own, 0, have, what=what).view(x.shape)

    def transpose(
        self, x: torch.Tensor, cut: int, cuts: Sequence[Share], join: int, joins: Sequence[Share], *, what: str
    ) -> torch.Tensor:
        """From all of dimension `cut` and a share of `join` to a share of `cut` and all of `join`.

        Args:
            x: all of `cut`, and `joins[rank]` of `join`.
            cuts, joins: each rank's share of either.

        Returns:
            `cuts[rank]` of `cut`, and all of `join`. What comes from others is rounded once.
        """
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        raw_elems = 0
        for rank, (start, stop) in enumerate(cuts):
            if rank != self.rank:
                part = x.narrow(cut, start, stop - start)
                outgoing[rank].append(self._encode(part))
                raw_elems += part.numel()
        start, stop = cuts[self.rank]
        across = _with(x.shape, cut, stop - start)
        shapes = [
            [_with(across, join, last - first)] if rank != self.rank else [] for rank, (first, last) in enumerate(joins)
        ]
        received = self._swap(outgoing, shapes, x, raw_elems, what)
        received[self.rank] = [x.narrow(cut, start, stop - start)]
        return torch.cat([part for parts in received for part in parts], join)

    def _encode(self, part: torch.Tensor) -> torch.Tensor:
        part = part.detach().contiguous()
        if self.codec is None:
            return part.view(-1).view(torch.uint8)
        return self.codec.encode(part).payload

    def _decode(self, payload: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if self.codec is None:
            # Bytes from the middle of a message may lie at any address.
            return payload.clone().view(like.dtype).view(shape)
        stride = strides_in_order(shape, tuple(range(len(shape))))
        return self.codec.decode(Encoded(self.codec, like.dtype, shape, stride, payload))

    def _nbytes(self, shape: tuple[int, ...], like: torch.Tensor) -> int:
        if self.codec is None:
            return torch.Size(shape).numel() * like.element_size()
        return self.codec.bytes_for(shape)

    def _swap(
        self,
        outgoing: list[list[torch.Tensor]],
        shapes: list[list[tuple[int, ...]]],
        like: torch.Tensor,
        raw_elems: int,
        what: str,
        *,
        to_all: bool = False,
    ) -> list[list[torch.Tensor]]:
        """What every other rank sends, decoded; nothing from this one."""
        received: list[list[torch.Tensor]] = [[] for _ in range(self.ranks)]
        if self.ranks == 1:
            return received
        sizes = [[self._nbytes(shape, like) for shape in wanted] for wanted in shapes]
        sizes_bytes = [sum(found) for found in sizes]
        before_bytes = self.exchange.sent_bytes
        parts = [torch.cat(found) if found else like.new_empty(0, dtype=torch.uint8) for found in outgoing]
        if to_all:
            own = parts[(self.rank + 1) % self.ranks]
            sizes_bytes[self.rank] = own.numel()
            messages = self.exchange.all_gather(own, sizes_bytes, what=what)
        else:
            messages = self.exchange.all_to_all(parts, sizes_bytes, what=what)
        self.traffic.add("activations", self.exchange.sent_bytes - before_bytes, raw_elems * FLOAT_BYTES)
        for rank, message in enumerate(messages):
            if rank != self.rank:
                split = message.split(sizes[rank])
                received[rank] = [
                    self._decode(payload, shape, like) for payload, shape in zip(split, shapes[rank], strict=True)
                ]
        return received


def _with(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """The shape with another length along `dim`."""
    changed = list(shape)
    changed[dim] = length
    return tuple(changed)
