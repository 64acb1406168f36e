"""Models whose weights cannot stay on the host: others move their gradients, or their hooks would be compiled."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from shoal.errors import InputError
from shoal.lowlevel.process_groups import sharded_modules
from shoal.lowlevel.torch_state import active_ddp_module, is_compiled

_INSTEAD = "give it the network itself and all-reduce the gradients of weights.parameters()"
_COMPILED = "HostWeights got a compiled model, whose graphs would not wait for the weights; train it without compiling"


def reject_wrapped(model: nn.Module) -> None:
    """Raise InputError if the model or a part of it is distributed over devices or ranks, or compiled."""
    for module in model.modules():
        # FSDP1 is told by its name, because importing it takes a second that other models need not wait for.
        wrappers = {kind.__name__ for kind in type(module).__mro__} & {
            "DataParallel",
            "DistributedDataParallel",
            "FullyShardedDataParallel",
        }
        if wrappers:
            raise InputError(f"HostWeights got a model in {wrappers.pop()}; {_INSTEAD}")
        if is_compiled(module):
            raise InputError(_COMPILED)
    if any(sharded_modules(model)):
        raise InputError("HostWeights got a sharded model; use shoal.distributed.ShardedWeights after fully_shard")


def reject_wrapped_since(model: nn.Module, parameters: Collection[torch.Tensor]) -> None:
    """Raise InputError if the model was wrapped, or its parameters were replaced, after its weights went to the host.

    Args:
        model: as it is called.
        parameters: that it had then.
    """
    ddp = active_ddp_module()
    if ddp is not None and any(module is model for module in ddp.modules()):
        raise InputError(f"HostWeights' model is called in DistributedDataParallel; {_INSTEAD}")
    if not set(model.parameters()).issuperset(parameters):
        raise InputError("parameters were replaced after HostWeights, as by fully_shard; give it what trains")


def refuse_compiled() -> None:
    """Raise InputError; called untraced, because Dynamo would run a hook that raises again, without compiling it."""
    raise InputError(_COMPILED)
