"""C++ that is compiled against the installed torch, once, on first use; `import shoal` needs no compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from shoal.core.files import cache_dir
from shoal.errors import InputError


def compiled(source: Path, purpose: str, *, links: Sequence[str] = ("c10",)) -> Path:
    """The shared library of `source` for this torch, built in seconds where the cache lacks it.

    No magic: all it does is call the C++ compiler and keep what it makes under a name made of source, torch,
    compiler and options.

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
    if built.is_file():
        return built
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / built.name
            command = [compiler, *options, str(source), *linked, "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise InputError(f"{purpose} did not compile with {compiler}: {first}; set CXX to a newer one")
            os.replace(fresh, built)
    except OSError as error:
        raise InputError(
            f"{purpose} cannot be built in {folder}: {error.strerror or error}; give a writable cache folder"
        ) from error
    return built
