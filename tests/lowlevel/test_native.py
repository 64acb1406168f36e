"""The native library is optional, and tells what the processor can do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.lowlevel import native

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["c++", "g++", "clang++"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if request.param == "c++" and (installed := native.library()) is not None:
        return installed  # which CMake has built with it
    compiler = shutil.which(request.param)
    if compiler is None or (request.param == "g++" and shutil.which("c++") is not None):
        pytest.skip(f"no {request.param}, or the same as c++")
    library = tmp_path_factory.mktemp("native") / "libshoal_native.so"
    sources = sorted(str(path) for path in (ROOT / "csrc").glob("*.cpp"))
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-o", str(library), *sources], check=True)
    loaded = native._load(library)
    assert loaded is not None
    return loaded


def test_the_kernels_and_their_loader_agree_on_the_abi_version(built: ctypes.CDLL) -> None:
    assert built.shoal_abi_version() == native.ABI_VERSION


def test_the_processor_and_linux_name_the_same_instruction_sets(built: ctypes.CDLL) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo")
    bits = built.shoal_cpu_features()
    asked = tuple(name for position, name in enumerate(native._FEATURES) if bits >> position & 1)
    assert asked == native.features_of_cpuinfo(cpuinfo.read_text())


def test_features_are_read_from_the_first_processor_of_arm_and_x86() -> None:
    assert native.features_of_cpuinfo("processor : 0\nflags\t\t: fpu avx2 fma\n\nflags : avx512f") == ("avx2", "fma")
    assert native.features_of_cpuinfo("Features\t: fp asimd aes") == ("neon",)
    assert native.features_of_cpuinfo("") == ()


def test_a_file_that_is_no_library_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "libshoal_native.so"
    broken.write_bytes(b"not an ELF file")
    assert native._load(broken) is None


def test_cpu_features_are_known_names_with_or_without_the_library() -> None:
    assert set(native.cpu_features()) <= set(native._FEATURES)
