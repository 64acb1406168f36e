"""Ranks compare a hash of their settings before they train on them: where one has others, every rank raises.

A codec, an option or a layout that differs between ranks need not fail: messages of one length are decoded into other
values, and weights drift apart. The exchange is made once at set-up, and wherever what was agreed on changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import torch

from shoal.codecs.codec import Codec
from shoal.core.version import __version__
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.message import HEADER_BYTES
from shoal.distributed.comm.silent_ranks import ranks_named
from shoal.errors import TransferError

_HASH_BYTES = 32
_SUMMARY_BYTES = _HASH_BYTES + 8  # a hash, and the length of the text that it was made of
_MAX_LISTED = 3  # settings in one line


def agree(exchange: Exchange, what: str, **settings: object) -> int:
    """Return if every rank's settings are equal. A collective call: every rank makes it before it goes on.

    Args:
        exchange: between the ranks; nothing else may be under way on it.
        what: is set up, for errors: "compress_gradients". Ranks that set up different things raise it as well.
        settings: by name, in as many words as an error needs; their `str` is compared.

    Returns:
        Bytes that this rank sent.

    Raises:
        TransferError: ranks differ; on every one of them, with the settings and who has which. Or one failed.
    """
    if exchange.ranks == 1:
        return 0
    mine = {"version of Shoal": __version__, "ranks": exchange.ranks, **settings}
    text = json.dumps({name: str(value) for name, value in mine.items()}).encode()
    summary = _hash(text) + len(text).to_bytes(8, "little")
    about = f"settings of {what}"
    summaries = exchange.all_gather_bytes(summary, [_SUMMARY_BYTES] * exchange.ranks, what=about)
    if any(one[:_HASH_BYTES] != summaries[0][:_HASH_BYTES] for one in summaries):
        lengths = [int.from_bytes(one[_HASH_BYTES:], "little") for one in summaries]
        texts = [json.loads(one) for one in exchange.all_gather_bytes(text, lengths, what=about)]
        raise TransferError(f"{what}: {_difference(texts)}; give every rank the same model, codec and options")
    return (exchange.ranks - 1) * (HEADER_BYTES + _SUMMARY_BYTES)


def described(codec: Codec | str | None) -> str:
    """A codec with its options, "auto", or None, as a setting.

    >>> from shoal import codecs
    >>> described(codecs.get("linear")), described(None)
    ('linear(block=4096)', 'none')
    """
    return "none" if codec is None else str(codec)


def fingerprint(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Names, shapes, types and whether they are trained, in a few words.

    >>> fingerprint(torch.nn.Linear(3, 2).named_parameters())
    '2 parameters, 8 values, hash 1fdf37f8'
    """
    facts = [(name, list(one.shape), str(one.dtype), one.requires_grad) for name, one in parameters]
    values = sum(torch.Size(shape).numel() for _, shape, _, _ in facts)
    return f"{len(facts)} parameters, {values} values, hash {short_hash(facts)}"


def short_hash(facts: object) -> str:
    """Of plain data, for a setting that is too long for a line.

    >>> short_hash([1, "a"]) == short_hash([1, "b"])
    False
    """
    return _hash(json.dumps(facts).encode()).hex()[:8]


def _difference(settings: Sequence[dict[str, str]]) -> str:
    """Which settings differ, and who has which."""
    names = {name: None for one in settings for name in one}
    differing = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(settings):
            by_value.setdefault(one.get(name, "not there"), []).append(rank)
        if len(by_value) > 1:
            differing.append(
                f"{name} " + ", ".join(f"{value} on {ranks_named(who)}" for value, who in by_value.items())
            )
    more = len(differing) - _MAX_LISTED
    return "ranks differ: got " + "; ".join([*differing[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])


def _hash(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
