"""The native kernels of `csrc/`, loaded with ctypes; without them callers use their torch references.

No magic: all it does is look for `libshoal_native` next to the installed package, compare its version of the C ABI and
hand out a `ctypes.CDLL`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from shoal.errors import InputError

log = logging.getLogger("shoal")

ABI_VERSION = 16
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
LEVELS = ("portable", "avx2", "avx512")  # in the order of ShoalLevel in csrc/shoal_native.h
# In the order of the bits of ShoalFeature in csrc/shoal_native.h.
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512bf16", "neon")
# Linux spells some of them differently.
_CPUINFO_NAMES = {"avx512_bf16": "avx512bf16", "avx512_vbmi": "avx512vbmi", "asimd": "neon"}


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where it was not built, does not load or has another ABI version; that is said once.

    Every function of `csrc/shoal_native.h` is an attribute; `restype` is set for those this module names, callers set
    the rest.

    >>> lib = library()
    >>> lib is None or lib.shoal_abi_version() == ABI_VERSION
    True
    """
    # Next to this file in an installed package; in site-packages when this file is run from a source tree.
    folders = (Path(__file__).parents[1], Path(sysconfig.get_paths()["platlib"]) / "shoal")
    for folder in folders:
        for path in (folder / f"libshoal_native{_SUFFIX}", folder / "libshoal_native.so"):
            found = _load(path) if path.is_file() else None
            if found is not None:
                return found
    log.warning(
        "the native kernels are not here, and PyTorch's own ops run in their place: install a wheel of Shoal, or "
        "install it again where there is a C++ compiler"
    )
    return None


@cache
def levels() -> tuple[str, ...]:
    """Of `LEVELS`, those that kernels run in on this machine, the best last; none where the library was not built."""
    native = library()
    return () if native is None else LEVELS[: native.shoal_norm_conv_level() + 1]


@cache
def function(name: str) -> Callable[..., int] | None:
    """A function of the library, by whose name its result is counted: int64 bytes, else an int32; None without it."""
    native = library()
    if native is None:
        return None
    found = getattr(native, name)
    found.restype = ctypes.c_int64 if name.endswith("_bytes") else ctypes.c_int32
    return cast(Callable[..., int], found)


@cache
def has(name: str) -> bool:
    """Whether the library is here and has a function, which one that was built before it was written has not."""
    native = library()
    return native is not None and hasattr(native, name)


def fields(text: str) -> list[tuple[str, Any]]:
    """The `_fields_` of a structure of `csrc/shoal_native.h`, as types each with names, separated by commas.

    A type is "pointer", one of ctypes such as "int64", an array of them as "int64*3", or "tensor": a pointer, and the
    int64 `ld_NAME` after it.

    >>> [name for name, _ in fields("int32 threads level, tensor x, pointer mean")]
    ['threads', 'level', 'x', 'ld_x', 'mean']
    """
    found: list[tuple[str, Any]] = []
    for kind, *names in map(str.split, text.split(",")):
        for name in names:
            if kind in ("pointer", "tensor"):
                found.append((name, ctypes.c_void_p))
                found += [(f"ld_{name}", ctypes.c_int64)] if kind == "tensor" else []
            else:
                base, _, length = kind.partition("*")
                one = getattr(ctypes, f"c_{base}")
                found.append((name, one * int(length) if length else one))
    return found


def run_on_numbers(name: str, types: str, *arguments: Any) -> None:
    """Call a function of the library that returns nothing, given numbers; tensors as their addresses.

    Args:
        types: of its arguments, as `fields` reads them.
    """
    function = getattr(library(), name)
    if function.argtypes is None:
        function.argtypes, function.restype = [kind for _, kind in fields(types)], None
    function(*arguments)


def run_native(name: str, arguments: ctypes.Structure) -> None:
    """Call a function of the library that takes one structure; ctypes releases the GIL meanwhile.

    Raises:
        InputError: there is no library, or it refuses: memory ran out, or the instruction set is not this machine's.
    """
    if _found(name)(ctypes.byref(arguments)) != 0:
        here = ", ".join(levels())
        raise InputError(f"{name}: out of memory, or not of an instruction set of this machine; it runs {here}")


def bytes_needed(name: str, *arguments: object) -> int:
    """What a function of the library that counts bytes returns.

    Raises:
        InputError: there is no library.
    """
    return int(_found(name)(*arguments))


def _found(name: str) -> Callable[..., int]:
    found = function(name)
    if found is None:
        raise InputError(f"{name}: the native library was not built; set SHOAL_KERNELS=reference")
    return found


@cache
def fingerprint() -> str | None:
    """Tells one build of the library from another; None where there is none."""
    native = library()
    return None if native is None else hashlib.sha256(Path(native._name).read_bytes()).hexdigest()[:16]


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL(str(path))
        found.shoal_abi_version.restype = ctypes.c_int32
        if found.shoal_abi_version() != ABI_VERSION:
            return None
        found.shoal_cpu_features.restype = ctypes.c_uint64
    except (OSError, AttributeError):
        return None
    return found


@cache
def cpu_features() -> tuple[str, ...]:
    """The instruction sets a kernel may be dispatched to, a subset of avx2 ... avx512bf16 and neon, in that order.

    Asked of the native library, else read from /proc/cpuinfo, else empty.
    """
    native = library()
    if native is not None:
        bits = native.shoal_cpu_features()
        return tuple(name for position, name in enumerate(_FEATURES) if bits >> position & 1)
    return features_of_cpuinfo(_cpuinfo())


def features_of_cpuinfo(text: str) -> tuple[str, ...]:
    """The same names from the text of Linux's /proc/cpuinfo.

    >>> features_of_cpuinfo("flags : fpu sse2 fma avx2 avx512_bf16")
    ('avx2', 'fma', 'avx512bf16')
    """
    present = {_CPUINFO_NAMES.get(flag, flag) for flag in _flags(text)}
    return tuple(name for name in _FEATURES if name in present)


@cache
def vector_flags() -> tuple[str, ...]:
    """All vector and matrix instruction sets of the processor, also those that only PyTorch's libraries use, as Linux
    names them; empty on other systems."""
    return tuple(sorted(flag for flag in _flags(_cpuinfo()) if flag.startswith(("avx", "amx", "fma", "sve", "asimd"))))


def _flags(cpuinfo: str) -> list[str]:
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((words for key, _, words in lines if key.strip() in ("flags", "Features")), "").split()


def _cpuinfo() -> str:
    if platform.system() == "Linux":
        try:
            return Path("/proc/cpuinfo").read_text()
        except OSError:
            pass
    return ""
