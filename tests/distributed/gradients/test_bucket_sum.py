"""One bucket's mean: its bits, its error, what becomes of NaN, and that no residual is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import codecs
from shoal.codecs.codec import Codec
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients.bucket_segments import ParameterGrad, cut, in_chunks
from shoal.distributed.gradients.bucket_sum import Buffers, CodedBucket, ShardedMean
from shoal.distributed.gradients.error_feedback import ErrorFeedback
from shoal.errors import InputError
from tests.distributed.gradients.test_bucket_segments import FLOAT_CODECS
from tests.distributed.in_memory import run_means

PIECES = (
    ParameterGrad("a", 1000, True),
    ParameterGrad("bias", 30, False),
    ParameterGrad("b", 5000, True),
    ParameterGrad("c", 7, True),
)
ELEMS = sum(piece.elems for piece in PIECES)


def gradients(ranks: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    scale = torch.logspace(-6, 0, ELEMS)
    return [(torch.randn(ELEMS) * scale).to(dtype) for _ in range(ranks)]


def sharded(
    buffers: list[torch.Tensor],
    codec: Codec,
    residuals: list[ErrorFeedback] | None = None,
    pieces: tuple[ParameterGrad, ...] = PIECES,
) -> None:
    ranks = len(buffers)
    shards = cut(pieces, ranks)

    def make(rank: int, scatter: Exchange, gather: Exchange) -> ShardedMean:
        feedback = None if residuals is None else residuals[rank]
        unflushed = feedback.add(pieces, shards[rank], torch.device("cpu")) if feedback else set()
        bucket = CodedBucket("bucket 0", shards, codec, rank, ranks, feedback, unflushed)
        return ShardedMean(bucket, buffers[rank], Buffers(), scatter, gather)

    run_means(make, ranks)


def test_a_bucket_in_chunks_has_the_bits_of_the_whole() -> None:
    whole = gradients(2)
    parts = [one.clone() for one in whole]
    shards = cut(PIECES, 2, part_elems=256)
    codec = codecs.get("dynamic_tree", block=256)
    chunks = in_chunks(shards, 1000)
    assert len(chunks) == 6
    for cuts, into in (((shards,), whole), (chunks, parts)):
        for chunk in cuts:
            run_means(
                lambda rank, *exchanges, chunk=chunk, into=into: ShardedMean(
                    CodedBucket("bucket 0", chunk, codec, rank, 2), into[rank], Buffers(), *exchanges
                ),
                2,
            )
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", FLOAT_CODECS)
def test_the_bits_are_those_of_its_definition(name: str, ranks: int) -> None:
    codec = codecs.get(name)
    mine = gradients(ranks)
    expected = torch.empty(ELEMS)
    for owner, shard in enumerate(cut(PIECES, ranks)):
        for segment in shard:
            total = mine[owner][segment.values].clone()
            for r in range(ranks):
                if r != owner:
                    part = mine[r][segment.values]
                    total += codec.decode(codec.encode(part)) if segment.encoded else part
            total /= ranks
            expected[segment.values] = codec.decode(codec.encode(total)) if segment.encoded else total
    sharded(mine, codec)
    for got in mine:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["dynamic_tree", "linear", "bf16", "round3"])
def test_the_error_is_that_of_two_roundings_at_most(name: str, ranks: int) -> None:
    codec = codecs.get(name, block=None) if name in ("dynamic_tree", "linear") else codecs.get(name)
    mine = gradients(ranks)
    wide = torch.stack(mine).double().mean(0)
    bound = torch.zeros(ELEMS, dtype=torch.float64)
    first = 0
    for piece in PIECES:
        of = slice(first, first + piece.elems)
        first += piece.elems
        if piece.encoded:
            each = sum(codec.error_bound(part[of]) for part in mine) / ranks
            bound[of] = each + codec.error_bound(wide[of].float()) + each * 0.1
    bound += 8 * 2.0**-24 * torch.stack(mine).double().abs().sum(0)
    sharded(mine, codec)
    for got in mine:
        assert bool(((got.double() - wide).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_buckets_are_summed_in_float32(dtype: torch.dtype) -> None:
    mine = gradients(3, dtype)
    wide = torch.stack(mine).double().mean(0)
    sharded(mine, codecs.get("round3"))
    step = torch.finfo(dtype).eps
    for got in mine:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wide, rtol=step, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FLOAT_CODECS)
@pytest.mark.parametrize("place", [3, 1010, 4000])
def test_what_is_no_number_surfaces_on_every_rank(name: str, value: float, place: int) -> None:
    mine = gradients(2)
    mine[1][place] = value
    residuals = [ErrorFeedback(2, rank) for rank in range(2)]
    sharded(mine, codecs.get(name), residuals)
    for got in mine:
        assert not bool(got[place].isfinite())
    after = gradients(2)
    sharded(after, codecs.get(name), residuals)
    for got in after:
        assert bool(got.isfinite().all())  # it is not in a residual for ever


@settings(max_examples=15)
@given(st.sampled_from(["one_bit", "linear", "truncate1"]), st.integers(2, 4), st.integers(0, 2**31))
def test_with_feedback_nothing_is_lost_though_buckets_change(name: str, ranks: int, seed: int) -> None:
    torch.manual_seed(seed)
    codec = codecs.get(name)
    residuals = [ErrorFeedback(ranks, rank) for rank in range(ranks)]
    sums = torch.zeros(ELEMS, dtype=torch.float64)
    came = torch.zeros(ELEMS, dtype=torch.float64)
    order = (3, 1, 0, 2)
    other = tuple(PIECES[number] for number in order)
    for step in range(6):
        mine = gradients(ranks)
        sums += torch.stack(mine).double().mean(0)
        if step < 3:
            sharded(mine, codec, residuals)
            came += mine[0].double()
            continue
        parts = [list(got.split([piece.elems for piece in PIECES])) for got in mine]
        mixed = [torch.cat([part[number] for number in order]) for part in parts]
        sharded(mixed, codec, residuals, other)
        back = dict(zip(order, mixed[0].split([piece.elems for piece in other]), strict=True))
        came += torch.cat([back[number] for number in range(4)]).double()
    left = torch.zeros(ELEMS, dtype=torch.float64)
    firsts = {"a": 0, "b": 1030, "c": 6030}
    for rank in range(ranks):
        state = residuals[rank].state_dict()
        for piece, of in state["gradients"].items():
            left[firsts[piece] : firsts[piece] + of.numel()] += of.double() / ranks
        for piece, start, of in state["means"]:
            left[firsts[piece] + start : firsts[piece] + start + of.numel()] += of.double()
    torch.testing.assert_close(came + left, sums, rtol=1e-4, atol=1e-5)


def test_an_unused_parameter_is_sent_as_zero_and_keeps_its_residual() -> None:
    codec = codecs.get("one_bit")
    residuals = [ErrorFeedback(2, rank) for rank in range(2)]
    sharded(gradients(2), codec, residuals)
    before = [feedback.state_dict() for feedback in residuals]
    unused = [torch.zeros(ELEMS) for _ in range(2)]
    sharded(unused, codec, residuals)
    for got, feedback, state in zip(unused, residuals, before, strict=True):
        assert not bool(got.any())
        after = feedback.state_dict()
        for name in ("a", "b", "c"):
            torch.testing.assert_close(after["gradients"][name], state["gradients"][name], rtol=0, atol=0)


def test_what_is_owed_is_loaded_by_the_same_rank_of_the_same_model() -> None:
    residuals = [ErrorFeedback(2, rank) for rank in range(2)]
    sharded(gradients(2), codecs.get("one_bit"), residuals)
    again = [ErrorFeedback(2, rank) for rank in range(2)]
    elems = {piece.name: piece.elems for piece in PIECES}
    for old, new in zip(residuals, again, strict=True):
        new.load_state_dict(old.state_dict(), elems, torch.device("cpu"))
    mine = gradients(2)
    copies = [part.clone() for part in mine]
    sharded(mine, codecs.get("one_bit"), residuals)
    sharded(copies, codecs.get("one_bit"), again)
    torch.testing.assert_close(copies[1], mine[1], rtol=0, atol=0)
    with pytest.raises(InputError):
        again[0].load_state_dict(residuals[1].state_dict(), elems, torch.device("cpu"))
    with pytest.raises(InputError):
        again[0].load_state_dict(residuals[0].state_dict(), elems | {"b": 3}, torch.device("cpu"))
