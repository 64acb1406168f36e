"""C++ that is compiled against the installed torch, once, on first use; `import shoal` needs no compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from shoal.core.files import cache_dir, write_atomically
from shoal.errors import InputError

_DIGEST_BYTES = hashlib.sha256().digest_size  # after the last byte that the loader reads


def compiled(source: Path, purpose: str, *, links: Sequence[str] = ("c10",)) -> Path:
    """The shared library of `source` for this torch, built in seconds where the cache lacks it, or holds a damaged one.

    No magic: all it does is call the C++ compiler and keep what it makes under a name made of source, torch,
    compiler and options, with a digest
    at its end.

    Args:
        source: a C++20 file.
        purpose: what it is for, as messages say it: "a memory limit on the CPU".
        links: libraries of torch that it calls.

    Raises:
        InputError: there is no compiler, it does not compile, or the cache folder cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise InputError(f"{purpose} needs a C++ compiler and none was found; install g++ or clang, or set CXX to one")
    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    options = ["-O2", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{home / 'include'}"]
    linked = [f"-L{home / 'lib'}", *(f"-l{name}" for name in links)]
    key = hashlib.sha256("\0".join([source.read_text(), torch.__version__, compiler, *options, *linked]).encode())
    folder = cache_dir() / "native"
    built = folder / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if _is_whole(built):
        return built
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            fresh = Path(scratch) / built.name
            command = [compiler, *options, str(source), *linked, "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise InputError(f"{purpose} did not compile with {compiler}: {first}; set CXX to a newer one")
            content = fresh.read_bytes()
        if built.is_dir() and not built.is_symlink():
            shutil.rmtree(built)  # nothing can be renamed to the name of a folder
        write_atomically(built, lambda file: file.write(content + hashlib.sha256(content).digest()))
    except OSError as error:
        raise InputError(
            f"{purpose} cannot be built in {folder}: {error.strerror or error}; give a writable cache folder"
        ) from error
    return built


def loaded(source: Path, purpose: str, *, links: Sequence[str] = ("c10",)) -> ctypes.CDLL:
    """The library of `compiled`, loaded into this process.

    Raises:
        InputError: as of `compiled`, or the system does not load what was built, such as from a disk without programs.
    """
    path = compiled(source, purpose, links=links)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise InputError(
            f"{purpose} was built and does not load: {error}; set SHOAL_CACHE to another folder"
        ) from error


def _is_whole(path: Path) -> bool:
    """Whether a library ends with the digest of what comes before it, as it is written.

    The loader does not look: what is cut stops it, or the process that calls into a page that is not there.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError:
        return False
    return (
        len(content) > _DIGEST_BYTES and hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
    )
