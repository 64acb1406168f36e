"""Triton's kernels compiled for a device that is not here, as calls with real shapes would have them compiled there.

Tensors are on PyTorch's "meta" device, so a call takes no memory, whatever its shape. Triton itself derives from the
arguments what each kernel is specialised for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

each_capability = pytest.mark.parametrize("capability", [80, 100])  # the oldest and the newest


def kernels_of(module: ModuleType) -> set[str]:
    """The kernels of a module that are launched: what others call returns something."""
    from triton.runtime.jit import JITFunction

    found = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name for name, kernel in found.items() if "return " not in kernel.src}


def there(*shape: int, dtype: torch.dtype = torch.float32, channels_last: bool = False, gap: int = 0) -> torch.Tensor:
    """A tensor without memory; with a gap a slice of the channels of one that has that many more."""
    wide = (*shape[:1], *(size + gap for size in shape[1:2]), *shape[2:])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    made = torch.empty(wide, dtype=dtype, device="meta", memory_format=layout)
    return made[:, : shape[1]] if gap else made


@contextmanager
def compiled_for(capability: int) -> Iterator[dict[str, set[str]]]:
    """Within the block a launch compiles its kernel for an NVIDIA GPU of this compute capability, and launches nothing.

    Yields:
        By the names of the kernels, what each was compiled to, in PTX, down to the device's own code.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Elsewhere:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # a kernel keeps what it compiled by this number

        def get_current_stream(self, device: int) -> int:
            return 0

    found: dict[str, set[str]] = defaultdict(set)
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        assert made.asm["cubin"]
        found[kernel.__name__].add(made.asm["ptx"])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", Elsewhere())
        patch.setattr(JITFunction, "run", compile_only)
        yield found
