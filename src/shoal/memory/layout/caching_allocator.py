"""PyTorch's caching allocator on CUDA as data: where it puts each block, and what it reserves of the device for it.

Blocks are handed out from the smallest free one that is large enough, of several from that of the oldest segment (from
PyTorch 2.13 on; see `segment_ages`), then the lowest; up to 1 MiB they come from pages of their own. With
`expandable_segments`, which is what is followed here, one range of addresses grows page by page where nothing free is
large enough, and a block at its growing end is taken only where no other is. `tests/cuda_standin/test_placement.py`
compares this with the allocator itself, address by address; PyTorch 2.12 chooses otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from typing import Any

from shoal.lowlevel.torch_versions import OLDEST_FIRST

BLOCK_BYTES = 512
LARGEST_SMALL_BYTES = 1 << 20
_PAGE_BYTES = {True: 2 << 20, False: 20 << 20}  # of small blocks, and of large ones
_LARGE_BYTES, _ROUND_BYTES = 10 << 20, 2 << 20  # from that many bytes on, a request is only for itself, rounded up
PASSES_LIMIT_BYTES = _PAGE_BYTES[False] - _ROUND_BYTES  # at most: whole pages are mapped, rounded requests count
_RANGE_BYTES = 1 << 44  # of addresses, more than any device has bytes
_YOUNGEST = 1 << 30  # what grows came after what does not


def block_bytes(nbytes: int) -> int:
    """What the allocator hands out for that many bytes.

    >>> block_bytes(1), block_bytes(513)
    (512, 1024)
    """
    return max(1, -(-nbytes // BLOCK_BYTES)) * BLOCK_BYTES


class AddressRange:
    """A range of addresses that is in use, free, or not backed by memory.

    Attributes:
        address, size_bytes: the range.
        small: whether it is of the pages for small blocks.
        age: its segment's, the oldest first; `_YOUNGEST` of a range that grows.
        free, mapped: a free one can be handed out; one that is not mapped takes no memory.
        before, after: its neighbours.
    """

    __slots__ = ("address", "after", "age", "before", "free", "mapped", "size_bytes", "small")

    def __init__(
        self, address: int, size_bytes: int, *, small: bool, age: int = _YOUNGEST, mapped: bool = True
    ) -> None:
        self.address, self.size_bytes, self.small, self.age = address, size_bytes, small, age
        self.free, self.mapped = True, mapped
        self.before: AddressRange | None = None
        self.after: AddressRange | None = None

    @property
    def end(self) -> int:
        """The address after it."""
        return self.address + self.size_bytes

    @property
    def grows(self) -> bool:
        """Whether it is of a range that grows."""
        return self.age == _YOUNGEST

    @property
    def reach_bytes(self) -> int:
        """Its size once it has grown."""
        beyond = self.after
        return self.size_bytes + (beyond.size_bytes if beyond is not None and not beyond.mapped else 0)


def _rank(block: AddressRange) -> tuple[int, int, int]:
    """What free blocks are sorted by: size, the segment's age, address."""
    return block.size_bytes, block.age if OLDEST_FIRST else 0, block.address


class LimitReached(Exception):
    """The allocator may not reserve what a block needs.

    Attributes:
        short_bytes: by how much it would pass its limit.
    """

    def __init__(self, short_bytes: int) -> None:
        super().__init__(f"{short_bytes} bytes are missing")
        self.short_bytes = short_bytes


class CachingAllocator:
    """The blocks of one stream of a device.

    What a snapshot does not tell is not known to it: pages that were given back below the lowest address that is left.

    Attributes:
        reserved_bytes: that are mapped. peak_reserved_bytes: the most of them.
        allocated_bytes: in use. peak_allocated_bytes: the most of them.
        limit_bytes: that may be reserved, as of `torch.cuda.set_per_process_memory_fraction`; None for no limit.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # ranks, sorted
        self._at: dict[int, AddressRange] = {}
        self._first: dict[bool, AddressRange] = {}  # of the range that grows

    @classmethod
    def of_snapshot(cls, segments: Iterable[Mapping[str, Any]]) -> CachingAllocator:
        """The allocator as `torch.cuda.memory_snapshot()` tells it.

        Args:
            segments: one stream's, of no private pool; those of a fixed size as `segment_ages` has them in order.
        """
        made = cls()
        given = list(segments)
        for small, kind in ((True, "small"), (False, "large")):
            some = [segment for segment in given if segment["segment_type"] == kind]
            for age, segment in enumerate(some):
                if not segment["is_expandable"]:
                    made._chain(made._blocks_of(segment, small=small, age=age))
            some.sort(key=lambda segment: int(segment["address"]))
            growing = [block for s in some if s["is_expandable"] for block in made._blocks_of(s, small=small)]
            if growing:
                made._first[small] = made._chain(_with_gaps(growing, small=small))
        made.peak_reserved_bytes, made.peak_allocated_bytes = made.reserved_bytes, made.allocated_bytes
        return made

    def in_use(self) -> list[AddressRange]:
        """The blocks in use, by address."""
        return sorted((block for block in self._at.values() if not block.free), key=lambda block: block.address)

    def holes(self, size_bytes: int) -> list[AddressRange]:
        """The free large blocks of at least that many bytes."""
        return [self._at[address] for nbytes, _, address in self._free[False] if nbytes >= size_bytes]

    def choice(self, size_bytes: int) -> AddressRange | None:
        """The free block that the next request of that many bytes is cut from; None where the range has to grow."""
        small = size_bytes <= LARGEST_SMALL_BYTES
        free = self._free[small]
        place = bisect_left(free, (size_bytes, 0, 0))
        if place == len(free):
            return None
        found = self._at[free[place][2]]
        for _, _, address in islice(free, place + 1, None):
            other = self._at[address]
            if not found.grows or other.reach_bytes >= found.reach_bytes:
                break
            found = other
        return found

    def allocate(self, nbytes: int) -> AddressRange:
        """Hand out a block.

        Raises:
            LimitReached: what is reserved would pass the limit, also once what is cached was given back.
        """
        size_bytes = block_bytes(nbytes)
        block = self.choice(size_bytes)
        if block is not None:
            self._take(block)
        else:
            block = self._grow(size_bytes, small=size_bytes <= LARGEST_SMALL_BYTES)
        left_bytes = block.size_bytes - size_bytes
        if left_bytes:
            rest = self._cut(block, size_bytes)
            self._put(rest)
        block.free = False
        self._at[block.address] = block
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: AddressRange) -> None:
        """Take a block back."""
        self.allocated_bytes -= block.size_bytes
        block.free = True
        after, before = block.after, block.before
        if after is not None and after.mapped and after.free:
            self._take(after)
            _join(block, after)
        if before is not None and before.mapped and before.free:
            self._take(before)
            self._at.pop(block.address, None)
            _join(before, block)
            block = before
        self._put(block)

    @property
    def top(self) -> int:
        """The address after the last large block in use of the range that grows."""
        return self._tail().address

    @property
    def bottom(self) -> int:
        """Where the range of large blocks that grows begins."""
        return self._range(small=False).address

    def is_of_range(self, address: int) -> bool:
        """Whether it is of the range of large blocks that grows."""
        first = self._range(small=False)
        return first.address <= address < first.address + _RANGE_BYTES and not any(
            block.address <= address < block.end for block in self._at.values() if not block.grows
        )

    def _tail(self) -> AddressRange:
        last = self._range(small=False)
        while last.after is not None:
            last = last.after
        before = last.before
        return before if before is not None and before.free and before.mapped else last

    def map_up_to(self, end: int, most_bytes: int) -> tuple[int, ...]:
        """Let the range of large blocks be mapped up to `end`, as far as `most_bytes` in use allow.

        Returns:
            The sizes that were allocated and released for it, all at once.
        """
        held: list[AddressRange] = []
        while (gap := self._first_gap(end)) is not None:
            start, stop = gap
            size_bytes = min(stop - start, (most_bytes - self.allocated_bytes) // BLOCK_BYTES * BLOCK_BYTES)
            if size_bytes <= LARGEST_SMALL_BYTES:
                break
            held.append(self.allocate(size_bytes))  # where a hole elsewhere is large enough, that is filled first
        sizes = tuple(block.size_bytes for block in held)
        for block in held:
            self.release(block)
        return sizes

    def _first_gap(self, end: int) -> tuple[int, int] | None:
        """The first addresses below `end` that are not mapped, with what is free before them."""
        at: AddressRange | None = self._range(small=False)
        while at is not None and at.address < end:
            if not at.mapped:
                before = at.before
                free = before is not None and before.mapped and before.free
                return before.address if free and before is not None else at.address, min(at.end, end)
            at = at.after
        return None

    def _put(self, block: AddressRange) -> None:
        insort(self._free[block.small], _rank(block))
        self._at[block.address] = block

    def _take(self, block: AddressRange) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, _rank(block))]
        del self._at[block.address]

    def _cut(self, block: AddressRange, size_bytes: int) -> AddressRange:
        rest = AddressRange(
            block.address + size_bytes,
            block.size_bytes - size_bytes,
            small=block.small,
            age=block.age,
            mapped=block.mapped,
        )
        block.size_bytes = size_bytes
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        return rest

    def trim(self) -> None:
        """Give whole pages that are free back to the device, as `torch.cuda.empty_cache` does."""
        for address in [address for kind in self._free.values() for _, _, address in kind]:
            block = self._at[address]
            if not block.grows:
                if block.before is None and block.after is None:  # all of its segment
                    self._take(block)
                    self.reserved_bytes -= block.size_bytes
                continue
            page_bytes, first = _PAGE_BYTES[block.small], self._range(small=block.small)
            begin = first.address + -(-(block.address - first.address) // page_bytes) * page_bytes
            end = first.address + (block.end - first.address) // page_bytes * page_bytes
            if begin < end:
                self._unmap(block, begin, end)

    def _unmap(self, block: AddressRange, begin: int, end: int) -> None:
        self._take(block)
        self.reserved_bytes -= end - begin
        middle = self._cut(block, begin - block.address) if begin > block.address else block
        if middle.end > end:
            self._put(self._cut(middle, end - middle.address))
        if middle is not block:
            self._put(block)
        middle.mapped = False
        beyond = middle.after
        if beyond is not None and not beyond.mapped:
            _join(middle, beyond)
        before = middle.before
        if before is not None and not before.mapped:
            _join(before, middle)

    def _make_room(self, size_bytes: int, *, small: bool) -> None:
        """Keep within the limit, which counts what the allocator would ask for, whatever is mapped in the end."""
        if self.limit_bytes is None:
            return
        asked_bytes = _PAGE_BYTES[small] if size_bytes < _LARGE_BYTES else -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES
        if self.reserved_bytes + asked_bytes > self.limit_bytes:
            self.trim()
        if self.reserved_bytes + asked_bytes > self.limit_bytes:
            raise LimitReached(self.reserved_bytes + asked_bytes - self.limit_bytes)

    def _grow(self, size_bytes: int, *, small: bool) -> AddressRange:
        self._make_room(size_bytes, small=small)
        start = self._room(self._range(small=small), size_bytes)
        if start.mapped:
            self._take(start)
        else:
            self._map(start, size_bytes)
        while start.size_bytes < size_bytes:
            beyond = start.after
            assert beyond is not None
            if not beyond.mapped:
                self._map(beyond, size_bytes - start.size_bytes)
            else:
                self._take(beyond)
            _join(start, beyond)
        beyond = start.after
        if beyond is not None and beyond.mapped and beyond.free:
            self._take(beyond)
            _join(start, beyond)
        return start

    def _range(self, *, small: bool) -> AddressRange:
        """The first block of the range that grows."""
        if small not in self._first:
            self._first[small] = AddressRange(_RANGE_BYTES * (2 + 2 * small), _RANGE_BYTES, small=small, mapped=False)
        return self._first[small]

    @staticmethod
    def _room(first: AddressRange, size_bytes: int) -> AddressRange:
        """The first place, by address, where enough addresses are free or not mapped."""
        at: AddressRange | None = first
        while at is not None:
            if not at.mapped:
                before = at.before
                start = before if before is not None and before.mapped and before.free else at
                room_bytes, beyond = start.size_bytes, start.after
                while beyond is not None and beyond.free and room_bytes < size_bytes:  # what is not mapped is free
                    room_bytes, beyond = room_bytes + beyond.size_bytes, beyond.after
                if room_bytes >= size_bytes:
                    return start
            at = at.after
        raise AssertionError("the last block reaches beyond all memory")

    def _map(self, block: AddressRange, wanted_bytes: int) -> None:
        page_bytes = _PAGE_BYTES[block.small]
        mapped_bytes = min(-(-wanted_bytes // page_bytes) * page_bytes, block.size_bytes)
        if mapped_bytes < block.size_bytes:
            self._cut(block, mapped_bytes)
        block.mapped = True
        self.reserved_bytes += mapped_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _blocks_of(self, segment: Mapping[str, Any], *, small: bool, age: int = _YOUNGEST) -> list[AddressRange]:
        self.reserved_bytes += int(segment["total_size"])
        made = []
        for block in segment["blocks"]:
            one = AddressRange(int(block["address"]), int(block["size"]), small=small, age=age)
            one.free = block["state"] == "inactive"
            made.append(one)
        return made

    def _chain(self, blocks: list[AddressRange]) -> AddressRange:
        for one, other in pairwise(blocks):
            one.after, other.before = other, one
        for block in blocks:
            if block.mapped and block.free:
                self._put(block)
            elif block.mapped:
                self._at[block.address] = block
                self.allocated_bytes += block.size_bytes
        return blocks[0]


def _join(block: AddressRange, beyond: AddressRange) -> None:
    block.size_bytes += beyond.size_bytes
    block.after = beyond.after
    if beyond.after is not None:
        beyond.after.before = block


def _with_gaps(blocks: list[AddressRange], *, small: bool) -> list[AddressRange]:
    """The blocks of a range that grows, and what is not mapped between and after them."""
    whole: list[AddressRange] = []
    for block in blocks:
        if whole and whole[-1].end < block.address:
            gap_bytes = block.address - whole[-1].end
            whole.append(AddressRange(whole[-1].end, gap_bytes, small=small, mapped=False))
        whole.append(block)
    return [*whole, AddressRange(whole[-1].end, _RANGE_BYTES, small=small, mapped=False)]
