"""The order of a step's copies and ops on the CPU, where the two threads of a link stand for streams."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.engine import open_transfers
from shoal.offload.links.open_link import open_link
from shoal.offload.links.slab import Copy, Slab
from tests.engine.several_graphs import Chain, breaks
from tests.engine.training_laws import blocks, costs_that_do_not_matter, images, mean_square, offload_by_chance
from tests.stream_order import COMPUTE, Access, Entry, Mark, Recorder, Wait, races, without_each_wait

TO_HOST, TO_DEVICE = 1, 2


class RecordedCopy:
    """A copy whose `wait` a recorder sees."""

    def __init__(self, copy: Copy, recorder: Recorder, done: int) -> None:
        self.copy, self.done, self._recorder = copy, done, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copy, name)

    def wait(self) -> None:
        self._recorder.add(Wait(COMPUTE, self.done))
        self.copy.wait()


class RecordedLink:
    """A link whose copies a recorder sees: each comes after what was computed when it was asked for."""

    def __init__(self, recorder: Recorder, *where: Any) -> None:
        self._link, self._recorder, self._events = open_link(*where), recorder, count()
        self._slabs: list[Slab] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def offload(self, storage: torch.UntypedStorage, slab: Slab, offset: int) -> RecordedCopy:
        done = self._record(TO_HOST, storage, slab, offset)
        return RecordedCopy(self._link.offload(storage, slab, offset), self._recorder, done)

    def fetch(self, storage: torch.UntypedStorage, slab: Slab, offset: int, after: RecordedCopy) -> RecordedCopy:
        done = self._record(TO_DEVICE, storage, slab, offset, Wait(TO_DEVICE, after.done))
        return RecordedCopy(self._link.fetch(storage, slab, offset, after.copy), self._recorder, done)

    def _record(self, stream: int, storage: torch.UntypedStorage, slab: Slab, offset: int, *waits: Wait) -> int:
        if slab not in self._slabs:
            self._slabs.append(slab)
        offset += self._slabs.index(slab) * 2**40
        asked, done, what = next(self._events), next(self._events), "offload" if stream == TO_HOST else "fetch"
        near, far, nbytes = storage.data_ptr(), offset - 2**60, storage.nbytes()  # the slabs, wherever they are
        self._recorder.add(Mark(COMPUTE, asked), Wait(stream, asked), *waits)
        self._recorder.add(Access(stream, near, near + nbytes, stream == TO_DEVICE, f"{what} of slot {offset}"))
        self._recorder.add(Access(stream, far, far + nbytes, stream == TO_HOST, f"{what} of slot {offset}"))
        self._recorder.add(Mark(stream, done))
        return done


def two_steps(net: torch.nn.Module, place: str) -> list[Entry]:
    """The record of two steps whose storages are offloaded, each at some place of its own."""
    recorder = Recorder("cpu")
    with costs_that_do_not_matter(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_transfers, "open_link", partial(RecordedLink, recorder))
        options = shoal.Options(planner=offload_by_chance(1, 0.0, 0.0))
        model = shoal.compile(net, budget="1TiB", offload_to=place, allow="bitwise", options=options)
        *first, one, two = images(5, 4, 3, 8, 8)
        for batch in first:  # these are metered
            mean_square(model(batch)).backward()
        recorder.entries.clear()
        with recorder:
            for batch in (one, two):
                mean_square(model(batch)).backward()
    copies = {entry.what for entry in recorder.entries if isinstance(entry, Access) and entry.begin < 0}
    assert len(copies) == 2 * len(model.shoal.plan.offloaded) >= 10
    return recorder.entries


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("graphs", [1, 3])
def test_no_access_races_with_a_copy_and_without_any_one_wait_some_would(
    graphs: int, kind: str, tmp_path: Path
) -> None:
    """Of several graphs, some wait for copies of others."""
    net: torch.nn.Module = torch.nn.Sequential(*blocks(3, 8, 8, 8))
    if graphs > 1:
        net = Chain(breaks, [torch.nn.Sequential(*blocks(*widths)) for widths in ((3, 8, 8), (8, 8, 8))], 8)
    entries = two_steps(net, "host" if kind == "host" else str(tmp_path))
    assert races(entries) == []
    assert [wait for wait, left in without_each_wait(entries) if not races(left)] == []
