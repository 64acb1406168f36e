"""Where a forward storage waits between its producer and its last reader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.core.records import read_object, read_record
from shoal.errors import InputError, brief


@dataclass(frozen=True)
class Keep:
    """It stays on the device from its first computation to its last reader."""


@dataclass(frozen=True)
class Recompute:
    """It is freed after its last reader of the forward pass and computed again just before backward ops.

    Attributes:
        before: names of the backward ops right before which it is computed again, in the order they run: the first
            that needs it, or an earlier one. Between two of them it is freed after its last reader, so naming an op
            more than the first trades time for memory. Empty: no one needs it again.
    """

    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offload:
    """It is copied to the host right after its last write and back before the backward pass reads it.

    Attributes:
        free_after: name of the forward op after which the device waits for the copy to the host and frees the bytes:
            its last reader of the forward pass or a later one. The paper's end of the offload.
        fetch_before: name of the backward op before which it gets device bytes again and the copy back begins: the op
            that reads it first or an earlier one. The paper's start of the prefetch. The device waits for that copy
            right before the first reader.
    """

    free_after: str
    fetch_before: str


@dataclass(frozen=True)
class Encode:
    """For the weight gradients of convolutions it waits in fewer bits: as its payload, a storage of its own.

    The payload is written right after the last forward op that reads the exact values, and has a residence of its own:
    it may be offloaded, a quarter of the bytes. Convolutions read in the backward pass what it is decoded to.

    Attributes:
        codec: a name of `shoal.codecs`.
        block_elems: values that share a scale; 0 for all.
        seed: of stochastic rounding; None rounds to nearest.
        payload: name of the storage that holds the encoded form.
        exact: what becomes of the exact values besides. Recompute where the recomputation of something else needs them.
    """

    codec: str
    block_elems: int
    seed: int | None
    payload: str
    exact: Keep | Recompute | Offload = Keep()


Residence = Keep | Recompute | Offload | Encode


def exact_residence(residence: Residence | None) -> Keep | Recompute | Offload:
    """Where the exact values are, whether or not they wait encoded too; an absent residence is Keep."""
    if isinstance(residence, Encode):
        return residence.exact
    return residence or Keep()


def residence_to_json(residence: Residence) -> dict[str, Any]:
    """A tagged dict."""
    if isinstance(residence, Encode):
        return {
            "residence": "encode",
            "codec": residence.codec,
            "block_elems": residence.block_elems,
            "seed": residence.seed,
            "payload": residence.payload,
            "exact": residence_to_json(residence.exact),
        }
    if isinstance(residence, Recompute):
        return {"residence": "recompute", "before": list(residence.before)}
    if isinstance(residence, Offload):
        return {"residence": "offload", "free_after": residence.free_after, "fetch_before": residence.fetch_before}
    return {"residence": "keep"}


def residence_from_json(value: Any, where: str = "residence") -> Residence:
    """The inverse of `residence_to_json`.

    Raises:
        InputError: it is none of a residence.
    """
    fields = dict(read_object(value, where))
    kind = fields.pop("residence", None)
    plain = {"keep": Keep, "recompute": Recompute, "offload": Offload}
    if isinstance(kind, str) and kind in plain:
        return read_record(plain[kind], fields, where)
    if kind != "encode":
        raise InputError(f"{where} is called {brief(kind)}; expected keep, recompute, offload or encode")
    exact = residence_from_json(fields.pop("exact", None), f"{where}.exact")
    if isinstance(exact, Encode):
        raise InputError(f"{where}.exact encodes once more; expected keep, recompute or offload")
    return replace(read_record(Encode, fields, where), exact=exact)
