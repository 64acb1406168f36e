"""Models that are refused before anything of them is captured."""

from __future__ import annotations

import logging

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from shoal.core.over_budget import over_budget
from shoal.core.sizes import format_bytes
from shoal.engine.model_call import ModelCall
from shoal.engine.session import Session
from shoal.engine.shared_budget import reject_member
from shoal.errors import InputError
from shoal.memory.storage_bytes import distinct_bytes
from shoal.transforms.stand_in import StandIn

log = logging.getLogger("shoal")


def reject_compiled(network: nn.Module) -> None:
    """Raise InputError where the model or a part of it is compiled in a way that would take the budget away."""
    if isinstance(network, OptimizedModule):
        raise InputError("model is what torch.compile returned; give shoal.compile the model itself, in place of that")
    if isinstance(network, nn.DataParallel):
        raise InputError("model is a DataParallel; wrap it in DistributedDataParallel, where each rank has its budget")
    for name, module in network.named_modules():
        if name and isinstance(module._compiled_call_impl, ModelCall):
            raise InputError(
                f"the model's part {name!r} has a budget of its own already; compile the whole model or that part only"
            )
    reject_member(network)
    if isinstance(network, StandIn):
        network.reject_sharded_parts()
    if network._compiled_call_impl is not None and not isinstance(network._compiled_call_impl, ModelCall):
        log.warning("%s was compiled by model.compile(); shoal.compile replaces that", type(network).__name__)


def reject_hopeless(model: nn.Module, session: Session) -> None:
    """Raise BudgetError where parameters, buffers and optimizer state by themselves are over the budget.

    Gradients are left to the plan: which parameters get one is known once the model is captured.
    """
    budget_bytes = session.status.budget_bytes or 0
    held_bytes = distinct_bytes((*model.parameters(), *model.buffers()))
    state_bytes = session.static.state_bytes()
    floor_bytes = held_bytes + state_bytes
    if budget_bytes < floor_bytes:
        raise over_budget(
            session.name,
            floor_bytes,
            budget_bytes,
            is_minimum=False,
            instead="a smaller model",
            details={
                "parameters and buffers": format_bytes(held_bytes),
                "optimizer state": format_bytes(state_bytes),
                "gradients and activations": "not counted yet; shoal.plan reports the minimum with them",
            },
            persistent_bytes=floor_bytes,
        )
