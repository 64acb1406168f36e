"""Triton kernels of the codecs; imported only where they run, by `shoal.lowlevel.triton_launch`.

A program works on a tile of ROWS blocks of COLUMNS elements, or of a part of one block that is longer. All arithmetic
that results depend on is on integers, or one IEEE division or multiplication that cannot be fused into an FMA.
"""

# mypy: ignore-errors
# Triton compiles these functions: their arguments are pointers and numbers of its own language.

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _tile(elems, block_elems, tiles_a_block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tile's first element, where its others lie from there, which of them there are, and their blocks."""
    program = tl.program_id(0)
    block = program // tiles_a_block * ROWS
    column = program % tiles_a_block * COLUMNS
    start = block.to(tl.int64) * block_elems + column
    columns = tl.arange(0, COLUMNS)
    within = tl.arange(0, ROWS)[:, None] * block_elems + columns[None, :]
    there = (columns < block_elems - column)[None, :] & (within < elems - start)
    return start, within, there, block + tl.arange(0, ROWS)


@triton.jit
def largest(x, magnitudes, elems, block_elems, tiles_a_block, COLUMNS: tl.constexpr):
    """Each block's greatest magnitude, as the bits of a float32, into int32 that are zero before."""
    start, within, there, block = _tile(elems, block_elems, tiles_a_block, 1, COLUMNS)
    bits = tl.load(x + start + within, mask=there, other=0.0).to(tl.int32, bitcast=True) & _MAGNITUDE
    tl.atomic_max(magnitudes + block, tl.max(bits, axis=1))  # of numbers >= 0 the greater has the greater bits


@triton.jit
def _uniform(element, seed):
    """lowbias32 of the element's number and the seed, as a number in [0, 1)."""
    h = element.to(tl.uint32) ^ seed.to(tl.uint32)
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["seed", "first_elem"])
def encode(
    x, codes, scales, buckets, values, fixed, elems, blocks, block_elems, tiles_a_block, before, last, seed,
    first_elem,
    SHIFT: tl.constexpr, FIXED: tl.constexpr, STOCHASTIC: tl.constexpr, MEASURED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a tile. MEASURED: `scales` holds what `largest` left there; else a tile is whole blocks.

    `buckets`: for each run of 2**SHIFT float32s, 7 bits of how many thresholds lie below it, and above these where in
    the run the one threshold lies that may be in it.
    """
    start, within, there, block = _tile(elems, block_elems, tiles_a_block, ROWS, COLUMNS)
    bits = tl.load(x + start + within, mask=there, other=0.0).to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    if MEASURED:
        # Another program of this block may have written the scale already: the same follows from it.
        greatest = tl.load(scales + block, mask=block < blocks, other=0.0).to(tl.int32, bitcast=True)
    else:
        greatest = tl.max(magnitude, axis=1)
    finite = greatest < _INFINITY
    scale = fixed + tl.zeros([ROWS], tl.float32) if FIXED else greatest.to(tl.float32, bitcast=True)
    scale_bits = tl.where(finite, scale.to(tl.int32, bitcast=True), _NAN)
    tl.store(scales + block, scale_bits.to(tl.float32, bitcast=True), mask=block < blocks)

    counts = finite & (scale > 0.0)
    share = tl.div_rn(magnitude.to(tl.float32, bitcast=True), tl.where(counts, scale, 1.0)[:, None])
    key = share.to(tl.int32, bitcast=True)
    entry = tl.load(buckets + tl.minimum(tl.maximum((key >> SHIFT) - before, 0), last))
    index = (entry & 127) + ((key & ((1 << SHIFT) - 1)) >= (entry >> 7)).to(tl.int32)
    if STOCHASTIC:
        low = tl.load(values + index)
        high = tl.load(values + tl.minimum(index + 1, 127))
        up = _uniform(start + within + first_elem, seed) < tl.div_rn(share - low, high - low)
        index += (up & (index < 127)).to(tl.int32)
    code = tl.where(counts[:, None], index, 0) | ((bits >> 24) & 128)
    tl.store(codes + start + within, code.to(tl.uint8), mask=there)


@triton.jit
def decode(
    codes, scales, values, out, elems, blocks, block_elems, tiles_a_block, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """out = value * scale, with the code's sign; a scale that is NaN gives the one NaN."""
    start, within, there, block = _tile(elems, block_elems, tiles_a_block, ROWS, COLUMNS)
    code = tl.load(codes + start + within, mask=there, other=0).to(tl.int32)
    scale = tl.load(scales + block, mask=block < blocks, other=0.0)[:, None]
    bits = (tl.load(values + (code & 127)) * scale).to(tl.int32, bitcast=True) | ((code & 128) << 24)
    bits = tl.where(scale == scale, bits, _NAN)
    tl.store(out + start + within, bits.to(tl.float32, bitcast=True), mask=there)


@triton.jit
def _narrowed(bits, DROPPED: tl.constexpr, NEAREST: tl.constexpr):
    """The bits of a float32, cut or rounded so that only the top 32 - DROPPED matter; a NaN keeps a mantissa bit."""
    magnitude = bits & _MAGNITUDE
    narrow = bits
    if NEAREST:
        below_half = (1 << (DROPPED - 1)) - 1
        if DROPPED == 24:  # codes are powers of four: but for that of 0, the middle of two is no half in bits
            below_half = tl.where(magnitude >= 1 << 24, below_half - 0x200000, below_half)
        rounded = bits + (((bits >> DROPPED) & 1) + below_half)  # ties to even; may reach infinity
        narrow = tl.where(magnitude < _INFINITY, rounded, bits)
    return tl.where(magnitude > _INFINITY, bits | 0x00400000, narrow)


@triton.jit
def pack_whole(x, packed, elems, DROPPED: tl.constexpr, NEAREST: tl.constexpr, COLUMNS: tl.constexpr):
    """The top 32 - DROPPED bits of each element, where `packed` has a type of that width."""
    start, within, there, _ = _tile(elems, COLUMNS, 1, 1, COLUMNS)
    bits = tl.load(x + start + within, mask=there, other=0.0).to(tl.int32, bitcast=True)
    tl.store(packed + start + within, (_narrowed(bits, DROPPED, NEAREST) >> DROPPED).to(packed.dtype.element_ty), there)


@triton.jit
def pack_words(x, packed, words, NEAREST: tl.constexpr, COLUMNS: tl.constexpr):
    """Three bytes of each element, four elements in three int32: every word reads the two elements it has bytes of."""
    start, within, there, _ = _tile(words, COLUMNS, 1, 1, COLUMNS)
    place = (start % 3).to(tl.int32) + within  # from a word where an element begins, so that it fits 32 bits
    first = start // 3 * 4 + place * 4 // 3
    shift = place % 3 * 8
    a = tl.load(x + first, mask=there, other=0.0).to(tl.int32, bitcast=True)
    b = tl.load(x + first + 1, mask=there, other=0.0).to(tl.int32, bitcast=True)
    a, b = _narrowed(a, 8, NEAREST), _narrowed(b, 8, NEAREST)
    low = ((a >> 8) & 0xFFFFFF) >> shift
    tl.store(packed + start + within, low | (((b >> 8) & 0xFFFFFF) << (24 - shift)), mask=there)


@triton.jit
def pack_bytes(x, packed, elems, WIDTH: tl.constexpr, NEAREST: tl.constexpr, COLUMNS: tl.constexpr):
    """The top WIDTH bytes of each element, one by one: for a buffer that begins or ends anywhere."""
    start, within, there, _ = _tile(elems, COLUMNS, 1, 1, COLUMNS)
    bits = tl.load(x + start + within, mask=there, other=0.0).to(tl.int32, bitcast=True)
    bits = _narrowed(bits, 32 - 8 * WIDTH, NEAREST)
    for byte in tl.static_range(WIDTH):
        to = packed + (start + within) * WIDTH + byte
        tl.store(to, ((bits >> (32 - 8 * WIDTH + 8 * byte)) & 255).to(tl.uint8), mask=there)


@triton.jit
def _widened(bits, WIDTH: tl.constexpr):
    """The float32 of the top bits; one byte has no code for infinity."""
    if WIDTH == 1:
        bits = tl.where((bits & _MAGNITUDE) == 0x7F000000, bits | _NAN, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def unpack_whole(packed, out, elems, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `pack_whole`."""
    start, within, there, _ = _tile(elems, COLUMNS, 1, 1, COLUMNS)
    bits = tl.load(packed + start + within, mask=there, other=0).to(tl.int32) << (32 - 8 * WIDTH)
    tl.store(out + start + within, _widened(bits, WIDTH), mask=there)


@triton.jit
def unpack_words(packed, out, elems, COLUMNS: tl.constexpr):
    """The inverse of `pack_words`: every element reads the one or two words that have bytes of it."""
    start, within, there, _ = _tile(elems, COLUMNS, 1, 1, COLUMNS)
    word = start // 4 * 3 + within * 3 // 4  # tiles begin with a word
    shift = (within * 3 % 4 * 8).to(tl.uint32)
    a = tl.load(packed + word, mask=there, other=0).to(tl.uint32, bitcast=True)
    b = tl.load(packed + word + 1, mask=there & (shift > 8), other=0).to(tl.uint32, bitcast=True)
    bits = ((a >> shift) | (b << ((32 - shift) & 31))) << 8
    tl.store(out + start + within, bits.to(tl.float32, bitcast=True), mask=there)


@triton.jit
def unpack_bytes(packed, out, elems, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `pack_bytes`."""
    start, within, there, _ = _tile(elems, COLUMNS, 1, 1, COLUMNS)
    bits = tl.zeros([1, COLUMNS], tl.int32)
    for byte in tl.static_range(WIDTH):
        one = tl.load(packed + (start + within) * WIDTH + byte, mask=there, other=0).to(tl.int32)
        bits |= one << (32 - 8 * WIDTH + 8 * byte)
    tl.store(out + start + within, _widened(bits, WIDTH), mask=there)


@triton.jit
def sign_mask(x, mask, elems, LARGEST: tl.constexpr, COLUMNS: tl.constexpr):
    """One bit for each element that is > 0, eight a byte, the first in the lowest bit.

    x: numbers as integers of their bits, of which those past LARGEST are NaN.
    """
    first = tl.program_id(0).to(tl.int64) * COLUMNS
    byte = tl.arange(0, COLUMNS // 8)
    place = tl.arange(0, 8)[None, :]
    within = byte[:, None] * 8 + place
    values = tl.load(x + first + within, mask=within < elems - first, other=0)
    flags = ((values > 0) & (values <= LARGEST)).to(tl.int32)
    tl.store(mask + first // 8 + byte, tl.sum(flags << place, axis=1).to(tl.uint8), mask=byte * 8 < elems - first)


@triton.jit
def _flags(bits, start, within, there):
    """Of each element, its bit."""
    element = start + within
    return (tl.load(bits + element // 8, mask=there, other=0).to(tl.int32) >> (element % 8).to(tl.int32)) & 1


@triton.jit
def unpack_flags(bits, out, elems, COLUMNS: tl.constexpr):
    """The inverse of `sign_mask`: 0 or 1 a byte."""
    start, within, there, _ = _tile(elems, COLUMNS, 1, 1, COLUMNS)
    tl.store(out + start + within, _flags(bits, start, within, there).to(tl.uint8), mask=there)


@triton.jit
def _halved_sum(lanes, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The sum of each row of lanes, by halves."""
    half: tl.constexpr = LANES // 2
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, half)), axis=1)  # of two numbers: their order does not matter
    if half > 1:
        return _halved_sum(lanes, ROWS, half)
    else:
        return tl.reshape(lanes, (ROWS,))


@triton.jit
def sum_sides(
    x, bits, sums, counts, elems, block_elems, runs_a_block, runs, longest,
    RUN: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of each run of RUN elements of a block: the sum and the count of what is not < 0, of what is, and its bits.

    In float64, lane by lane in order, and lanes by halves. `longest`: elements of the longest run.
    """
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begun = run % runs_a_block * RUN  # within the block
    first = run // runs_a_block * block_elems + begun
    length = tl.minimum(tl.minimum(block_elems - begun, elems - first), RUN)
    length = tl.where(run < runs, tl.maximum(length, 0), 0)
    lane = tl.arange(0, LANES)
    byte = tl.arange(0, LANES // 8)
    plus = tl.zeros([ROWS, LANES], tl.float64)
    minus = tl.zeros([ROWS, LANES], tl.float64)
    fewer = tl.zeros([ROWS, LANES], tl.int32)
    for row in range(0, longest, LANES):
        there = (row + lane)[None, :] < length[:, None]
        values = tl.load(x + first[:, None] + (row + lane)[None, :], mask=there, other=0.0)
        negative = values < 0.0
        plus += tl.where(negative, 0.0, values).to(tl.float64)
        minus += tl.where(negative, values, 0.0).to(tl.float64)
        fewer += negative.to(tl.int32)
        places = tl.reshape(negative.to(tl.int32), (ROWS, LANES // 8, 8)) << tl.arange(0, 8)[None, None, :]
        to = bits + first[:, None] // 8 + (row // 8 + byte)[None, :]
        tl.store(to, tl.sum(places, axis=2).to(tl.uint8), mask=(row + byte * 8)[None, :] < length[:, None])
    below = tl.sum(fewer, axis=1)
    tl.store(sums + run * 2, _halved_sum(plus, ROWS, LANES), mask=run < runs)
    tl.store(sums + run * 2 + 1, _halved_sum(minus, ROWS, LANES), mask=run < runs)
    tl.store(counts + run * 2, (length - below).to(tl.int32), mask=run < runs)
    tl.store(counts + run * 2 + 1, below, mask=run < runs)


@triton.jit
def mean_sides(sums, counts, means, runs_a_block, runs, blocks, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """The two means of each block from its runs, in order; the one NaN for both where one is in the block."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    side = tl.arange(0, 2)[None, :]
    total = tl.zeros([ROWS, 2], tl.float64)
    count = tl.zeros([ROWS, 2], tl.int64)
    for begin in range(0, runs_a_block, AHEAD):
        for ahead in tl.static_range(AHEAD):
            run = block * runs_a_block + begin + ahead
            there = ((block < blocks) & (begin + ahead < runs_a_block) & (run < runs))[:, None]
            total += tl.load(sums + run[:, None] * 2 + side, mask=there, other=0.0)
            count += tl.load(counts + run[:, None] * 2 + side, mask=there, other=0)
    mean = tl.where(count > 0, total / tl.maximum(count, 1).to(tl.float64), 0.0).to(tl.float32)
    missing = tl.max((total != total).to(tl.int32), axis=1)[:, None] > 0
    mean_bits = tl.where(missing, _NAN, mean.to(tl.int32, bitcast=True))
    tl.store(means + block[:, None] * 2 + side, mean_bits.to(tl.float32, bitcast=True), mask=(block < blocks)[:, None])


@triton.jit
def decode_sides(
    bits, means, out, elems, blocks, block_elems, tiles_a_block, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Each element's mean, by its bit."""
    start, within, there, block = _tile(elems, block_elems, tiles_a_block, ROWS, COLUMNS)
    plus = tl.load(means + block * 2, mask=block < blocks, other=0.0)[:, None]
    minus = tl.load(means + block * 2 + 1, mask=block < blocks, other=0.0)[:, None]
    tl.store(out + start + within, tl.where(_flags(bits, start, within, there) == 1, minus, plus), mask=there)


INTERPRETED = not isinstance(encode, triton.JITFunction)  # TRITON_INTERPRET=1 was set before this was imported
