"""A spill file takes its room at once, has no name, and gives everything back."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TransferError
from shoal.offload.links import file as module
from shoal.offload.links.file import FileSlab, SpillFile
from tests.offload.links.slabs import open_files
from tests.raising import raising

MiB = 2**20


def without_direct_io(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_DIRECT", 0)


def refusing_direct_io_when_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpillFile, "_takes_direct", lambda _: False)


def without_nameless_files(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(os, "O_TMPFILE", raising=False)


def with_all_there_is(patch: pytest.MonkeyPatch) -> None:
    pass


every_file_system = pytest.mark.parametrize(
    "restrict", [with_all_there_is, without_direct_io, refusing_direct_io_when_used, without_nameless_files]
)


def used_bytes(file: SpillFile) -> int:
    return os.fstat(file._fd).st_blocks * 512


@every_file_system
def test_what_is_written_is_read_again(
    restrict: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restrict(monkeypatch)
    monkeypatch.setattr(module, "_BOUNCE_BYTES", 8192)
    file = SpillFile(tmp_path)
    assert file.direct in {without_direct_io: {False}, refusing_direct_io_when_used: {False}}.get(
        restrict, {True, False}
    )
    slabs = [FileSlab(file, 5 * 8192), FileSlab(file, 8192)]
    sizes = [(slabs[0], 0, 3 * 8192 + 17), (slabs[0], 4 * 8192, 8192), (slabs[1], 0, 1)]
    sent = [torch.randint(256, (nbytes,), dtype=torch.uint8) for _, _, nbytes in sizes]
    for tensor, (slab, offset, nbytes) in zip(sent, sizes, strict=True):
        slab.write(offset, tensor.data_ptr(), nbytes)
    for tensor, (slab, offset, nbytes) in zip(sent, sizes, strict=True):
        back = torch.zeros_like(tensor)
        slab.read(offset, back.data_ptr(), nbytes)
        assert torch.equal(back, tensor)


@given(st.data())
def test_slabs_of_one_file_do_not_touch(data: st.DataObject) -> None:
    file = SpillFile("/tmp")
    held: dict[FileSlab, torch.Tensor] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        if held and data.draw(st.booleans()):
            held.pop(data.draw(st.sampled_from(list(held))))
            continue
        nbytes = data.draw(st.integers(1, 3 * 4096))
        slab, tensor = FileSlab(file, 3 * 4096), torch.randint(256, (nbytes,), dtype=torch.uint8)
        slab.write(0, tensor.data_ptr(), nbytes)
        held[slab] = tensor
        del slab, tensor
    for slab, tensor in held.items():
        back = torch.zeros_like(tensor)
        slab.read(0, back.data_ptr(), back.nbytes)
        assert torch.equal(back, tensor)


@every_file_system
def test_the_file_has_no_name_and_its_folder_may_go(
    restrict: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restrict(monkeypatch)
    folder = tmp_path / "spill"
    folder.mkdir()
    file = SpillFile(folder)
    assert list(folder.iterdir()) == []
    folder.rmdir()
    slab, out = FileSlab(file, MiB), torch.arange(100)
    slab.write(0, out.data_ptr(), out.nbytes)
    back = torch.zeros_like(out)
    slab.read(0, back.data_ptr(), back.nbytes)
    assert torch.equal(out, back)


def test_room_is_taken_when_a_slab_is_made_and_given_back_when_it_dies(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    slabs = [FileSlab(file, 2 * MiB), FileSlab(file, MiB)]
    assert used_bytes(file) >= 3 * MiB
    del slabs[0]
    assert MiB <= used_bytes(file) < 2 * MiB
    slabs.clear()
    assert used_bytes(file) < MiB
    del file
    assert open_files(tmp_path) == 0


def test_a_full_disk_is_told_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(tmp_path)
    before = used_bytes(file)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with raising(TransferError, tmp_path, "1.000 MiB"):
            FileSlab(file, MiB)
    assert used_bytes(file) <= before
    assert FileSlab(file, MiB)


def test_more_than_any_disk_has_leaves_nothing_taken(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    before = used_bytes(file)
    with pytest.raises(TransferError):
        FileSlab(file, 2**62)
    assert used_bytes(file) <= before
    assert FileSlab(file, MiB)


def test_a_folder_that_is_not_there_or_no_folder_is_named(tmp_path: Path) -> None:
    occupied = tmp_path / "a file"
    occupied.write_text("")
    for folder, why in ((tmp_path / "nowhere", "No such file"), (occupied, "Not a directory")):
        with raising(TransferError, folder, why):
            SpillFile(folder)
    assert open_files(tmp_path) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with raising(TransferError, tmp_path):
        SpillFile(tmp_path)


def test_nothing_is_left_when_the_process_is_killed(tmp_path: Path) -> None:
    out = torch.arange(1000)
    child = os.fork()
    if child == 0:
        try:
            slab = FileSlab(SpillFile(tmp_path), MiB)
            slab.write(0, out.data_ptr(), out.nbytes)
            if os.listdir(tmp_path) == []:
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
