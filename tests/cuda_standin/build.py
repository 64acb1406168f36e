"""Builds the stand-in for the CUDA build of torch that runs this: `python tests/cuda_standin/build.py OUT`.

OUT gets `preload.so` (the runtime, cuBLAS and cuDNN: every function that torch's libraries name, of which those that
`device/` does not define answer 0) and the folder `lib` with the driver's libraries, which are loaded by name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

DEVICE = Path(__file__).parent / "device"
_PRELOADED = ("runtime.c", "libraries.c", "batch_norm.c")
_OF_TORCH = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
_NAMED = re.compile(r"(cuda[A-Z]|__cuda|cublas|cudnn|curand|cusolver)")
_DEFINED = re.compile(r"^EXPORT\b[^(]*?(\w+)\(", re.MULTILINE)
# These need no device: the real libraries answer.
_LEFT_TO_CUDA = {"cudnnGetVersion", "cudnnGetCudartVersion", "cudnnGetErrorString", "cublasGetStatusString"}


def build(out: Path) -> None:
    """Compile everything into the folder `out`."""
    (out / "lib").mkdir(parents=True, exist_ok=True)
    (out / "answers.c").write_text(answering_0(functions_of_torch() - defined() - _LEFT_TO_CUDA))
    packages = Path(sysconfig.get_paths()["purelib"])
    folders = [*sorted(packages.glob("nvidia/*/include")), packages / "triton/backends/nvidia/include"]
    include = [f"-I{folder}" for folder in folders]
    compile_c([*(DEVICE / name for name in _PRELOADED), out / "answers.c"], out / "preload.so", *include)
    compile_c([DEVICE / "driver.c"], out / "lib" / "libcuda.so.1")
    compile_c([DEVICE / "management.c"], out / "lib" / "libnvidia-ml.so.1")
    link = out / "lib" / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so.1")


def functions_of_torch() -> set[str]:
    """The functions of CUDA's libraries that torch's libraries call."""
    named: set[str] = set()
    for name in _OF_TORCH:
        library = Path(torch.__file__).parent / "lib" / f"lib{name}.so"
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        symbols = (line.split()[1].split("@")[0] for line in listed.stdout.splitlines())
        named |= {symbol for symbol in symbols if _NAMED.match(symbol)}
    return named


def defined() -> set[str]:
    """The functions that the preloaded sources define."""
    return {name for source in _PRELOADED for name in _DEFINED.findall((DEVICE / source).read_text())}


def answering_0(names: set[str]) -> str:
    """C source of functions that return 0, whatever they are given."""
    lines = (f'__attribute__((visibility("default"))) int {name}(void) {{ return 0; }}' for name in sorted(names))
    return "\n".join(lines) + "\n"


def compile_c(sources: list[Path], out: Path, *options: str) -> None:
    """A shared library of C sources."""
    # CUDA's headers declare many of these functions with other types, on which the answer does not depend.
    flags = ["-O1", "-w", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, *options, "-o", out, *sources, "-lpthread", "-ldl"], check=True)


if __name__ == "__main__":
    if not torch.version.cuda:
        sys.exit(f"the stand-in is for a CUDA build of torch; this is {torch.__version__}")
    build(Path(sys.argv[1]))
