"""The table of rewrites: all that Shoal changes in the joint graph of a captured step, but pieces and encoded inputs.

A new rewrite is a file with its `match` and `apply`, and a row here. `tests/rewrites/test_table.py` holds every row to
its guarantee.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from shoal.graph.joint import Joint
from shoal.rewrites import (
    activations,
    buffers,
    concatenations,
    convolutions,
    copies,
    dropout,
    fused_norms,
    layouts,
    masked_sums,
    norms,
    order,
    pooling,
)
from shoal.rewrites.rewrite import Rewrite, call_instead, rewrite

SIZED = (
    Rewrite("sums through masks", masked_sums.sums_through_masks, masked_sums.sum_at_once),
    Rewrite("sums through indices", masked_sums.sums_through_indices, masked_sums.sum_at_once),
)
"""Without them a gradient has a size that is not known before the step runs: capture applies them first, always."""

TABLE: Sequence[Rewrite] = (
    *SIZED,
    # First what functional graphs copy, so that the others find results where they are made.
    Rewrite("copies dropped", copies.copies, copies.drop_copy),
    Rewrite("unread statistics not saved", buffers.unread_statistics, call_instead),
    Rewrite("whole scatters viewed", copies.whole_scatters, copies.view_what_is_written),
    Rewrite("written copies dropped", copies.uncopied_writes, copies.drop_copy),
    Rewrite("nested views written at once", copies.nested_writes, copies.write_at_once),
    # Merging assumes that no op writes what another has made: before buffers are changed in place.
    Rewrite("duplicates merged", copies.duplicates, copies.merge),
    Rewrite("statistics moved in place", buffers.moved_statistics, buffers.move_in_place),
    Rewrite("batches counted in place", buffers.counters, buffers.count_in_place),
    Rewrite("batches counted at once", buffers.launched_counters, buffers.count_at_once),
    Rewrite("changed buffers copied", buffers.small_buffers, buffers.read_copy),
    # Layouts follow from the kernels that run: after cuDNN's are chosen.
    Rewrite("gradients typed as computed", layouts.converted_gradients, layouts.type_as_kernel_does),
    Rewrite("batch norms left to cuDNN", norms.left_to_cudnn, norms.leave_to_cudnn),
    Rewrite("gradients laid out as computed", layouts.laid_out_otherwise, layouts.lay_out_as_kernel_does),
    # Each of these reads the final layouts and has ops of its own.
    Rewrite("results in their own storage", layouts.small_results, call_instead),
    Rewrite("batch norm gradients in place", norms.batch_norms_in_place, call_instead),
    Rewrite("group norm gradients in place", norms.group_norms_in_place, call_instead),
    Rewrite("layer norm gradients in place", norms.layer_norms_in_place, call_instead),
    Rewrite("PReLU gradients in place", activations.prelus_in_place, activations.add_up_slopes),
    Rewrite("clipped outputs saved", activations.clipped_outputs, activations.read_output),
    Rewrite("leaky outputs saved", activations.leaky_outputs, activations.read_output),
    Rewrite("convolution gradients split", convolutions.joint_gradients, convolutions.split_gradients),
    # Of the split ones: the weight's gradient is cut, the input's does not read the input.
    Rewrite("large weight gradients cut", convolutions.large_weights, call_instead),
    Rewrite("convolution inputs not saved", convolutions.input_gradients, convolutions.leave_input_out),
    Rewrite("dropout masks in bytes", dropout.dropouts, dropout.keep_bits),
    Rewrite("noise drawn in layout", dropout.noises, dropout.draw_in_layout),
    Rewrite("pooling indices in bytes", pooling.pools, pooling.encode_pool),
    Rewrite("fused norm gradients multiplied where read", fused_norms.products, fused_norms.multiply_where_read),
    Rewrite("fused norm gradients added while written", fused_norms.sums, fused_norms.add_while_written),
    Rewrite("gradients of parts added whole", concatenations.sums_of_parts, concatenations.add_whole),
    # The order of ops is changed when they are final.
    Rewrite("made just before the backward pass reads it", order.made_of_forward, order.move),
    Rewrite("slices of norms just before they are read", order.slices, order.move),
    # Masks last: only then it is known what else reads an activation, and pooling's codes have taken theirs in.
    Rewrite("activation masks", activations.masks, activations.read_mask),
    # Neither lowers what is in use when the backward pass begins, where a step that keeps all it saves has its peak.
    Rewrite("activation masks after other readers", activations.later_masks, activations.read_mask, "compact"),
    Rewrite("waiting parts copied", concatenations.waiting_parts, concatenations.copy_part, "compact"),
    Rewrite("native convolutions", convolutions.able, convolutions.compute_natively, "direct", "exact", True),
    # Of the native ones: whether they are all that read a concatenation.
    Rewrite("parts read natively", convolutions.parts_read_natively, convolutions.read_parts, "direct", "exact"),
    Rewrite("gradients of parts", convolutions.gradients_of_parts, convolutions.give_parts, "direct", "exact"),
    Rewrite("concatenations left out", concatenations.able, concatenations.leave_out, "direct", "exact", True),
)


def save_fewer_bytes(
    joint: fx.GraphModule, backward: set[fx.Node], *, cpu_kernels: bool = True, table: Sequence[Rewrite] = TABLE
) -> None:
    """Apply the rewrites that are made to every step; none changes a bit of a result.

    Args:
        joint: the joint graph.
        backward: its backward nodes; new ones are added.
        cpu_kernels: make those too that are only for the CPU, if the tensors are on it. False for a step that is
            captured here but planned for another device.
        table: the rewrites.
    """
    rewrite(Joint(joint, backward, runs_here=cpu_kernels), table)
    joint.graph.lint()
