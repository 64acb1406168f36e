"""A captured step that is rewritten: new nodes among those of a copy, which is read as a step again."""

from __future__ import annotations

from collections.abc import Collection

from shoal.capture.captured import Captured
from shoal.capture.step_reader import read_joint
from shoal.graph.fx_nodes import copied_joint
from shoal.graph.joint import Joint
from shoal.rewrites.rewrite import rewrite
from shoal.rewrites.table import TABLE


class StepWriter(Joint):
    """Writes into a copy of a step's joint graph; the step stays as it is.

    Args:
        captured: the step.
    """

    def __init__(self, captured: Captured) -> None:
        super().__init__(copied_joint(captured.joint), set())
        self._read_with = captured.read_with
        for node in self.graph.nodes:
            is_op = node.name in captured.node_of
            if node.name in captured.backward_names or not (is_op or self.backward.isdisjoint(node.all_input_nodes)):
                self.backward.add(node)

    def read(self) -> Captured:
        """The step that the copy is now."""
        self.graph.lint()
        return read_joint(self.module, {node.name for node in self.backward}, self._read_with)


def with_technique(captured: Captured, technique: str, chosen: Collection[str]) -> Captured:
    """The step with the rewrites of a technique; `captured` stays as it is.

    Args:
        captured: the step.
        technique: of the rewrites, as in their table.
        chosen: names of the ops to rewrite.

    Raises:
        PlanError: one of them is no op of this step that can be.
    """
    writer = StepWriter(captured)
    rewrite(writer, TABLE, technique, chosen)
    return writer.read()


def shrunk(captured: Captured) -> Captured | None:
    """The step with less between the ops of its backward pass; None if nothing can be. `captured` stays as it is."""
    module = copied_joint(captured.joint)
    joint = Joint(module, {node for node in module.graph.nodes if node.name in captured.backward_names})
    if not rewrite(joint, TABLE, "compact"):
        return None
    joint.graph.lint()
    return read_joint(module, {node.name for node in joint.backward}, captured.read_with)
