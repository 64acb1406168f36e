"""What differs between the versions of PyTorch that Shoal supports, 2.12 to 2.15. No other module asks for the version.

Each entry names the versions that need it, and is removed with them.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

NEWEST_TESTED = (2, 15)
_private: Any = torch._C  # its stubs lack these names

# Among free blocks of one size the caching allocator takes the lowest (2.12), that of the oldest segment (2.13 on).
OLDEST_FIRST = torch.__version__ >= "2.13"

# What 2.12 chooses cannot be predicted from the allocator's record. Builds without CUDA have no record.
CAN_RECORD_ALLOCATIONS = hasattr(_private, "_cuda_setMemoryMetadata") and not "2.12" <= torch.__version__ < "2.13"

# The bytes of cuBLAS's workspace, from 2.13 on.
cublas_workspace_size = getattr(torch.backends.cuda, "cublas_workspace_size", None)

# Renamed in 2.12; kept for 2.11, which GPU machines may have, though no other line of Shoal is for it.
set_allocator_settings = (
    getattr(_private, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
)
get_allocator_settings = getattr(_private, "_accelerator_getAllocatorSettings", str)

# Arguments of torch.compile() that count its graphs of a function apart from others', from 2.13 on.
COUNTED_APART = {"isolate_recompiles": True} if torch.__version__ >= "2.13" else {}

# What Dynamo traces `tensor.data = value` as: `set_` to 2.13, an op of its own from 2.14 on.
DATA_ASSIGNMENTS = (torch.Tensor.set_, "set_", getattr(torch.ops.aten, "shallow_copy_data_", "set_"))


@cache
def warn_if_untested() -> None:
    """Log a warning, once a process, if PyTorch is newer than the newest version that the tests have run with."""
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        logging.getLogger("shoal").warning(
            f"PyTorch {torch.__version__} is newer than {newest}, the newest version that Shoal is tested with. If a "
            f"step fails or exceeds its budget, try pip install 'torch=={newest}.*'."
        )
