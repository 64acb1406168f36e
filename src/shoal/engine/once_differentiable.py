"""A planned step has gradients, but none of second order: asking for them is refused before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shoal.errors import CaptureError


def once_differentiable(compiled: Callable[..., Any], returned: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """What AOTAutograd compiled, whose backward pass refuses `create_graph=True` in our words.

    Args:
        compiled: the step.
        returned: called with what it returns, and the autograd node that runs its backward pass.

    Raises:
        CaptureError: in the backward pass, where its gradients are to be differentiated again.
    """

    def differentiable(outputs: Any, node: Any) -> None:
        node.register_prehook(_reject_second_order)
        returned(outputs, node)

    return with_backward(compiled, differentiable)


def with_backward(compiled: Callable[..., Any], returned: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """What AOTAutograd compiled; `returned` is called as for `once_differentiable`."""

    def run(*arguments: Any) -> Any:
        outputs = compiled(*arguments)
        node = backward_of(outputs)
        if node is not None:
            returned(outputs, node)
        return outputs

    if getattr(compiled, "_boxed_call", False):
        run._boxed_call = True  # type: ignore[attr-defined]
    return run


def backward_of(outputs: Iterable[Any]) -> Any:
    """The autograd node that runs the compiled backward pass; an output may be a view of what that node returns."""
    for output in tree_leaves(outputs):
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        while node is not None:
            if node.name().startswith("CompiledFunction"):
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def _reject_second_order(gradients: tuple[torch.Tensor, ...]) -> None:
    if torch.is_grad_enabled():
        raise CaptureError(
            "gradients of a planned step cannot be differentiated again (create_graph=True); call model.forward(...), "
            "which runs without a plan"
        )
