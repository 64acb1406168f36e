"""Parallelism as the papers have it: hybrid parallelism and model-parallel layers.

"8-bit approximations for parallelism in deep learning" (Dettmers 2016): data-parallel convolutions and model-parallel
linear layers, which exchange encoded activations in rounds of sub-batches, locally connected layers, and data
parallelism that adds a rank's own gradients exactly (`local_exact`, of any network under DDP). The library's
`compress_gradients`, `HostWeights` and `ShardedWeights` take any network under DDP or FSDP2 and measure which codec
pays. What else is here takes only networks of the papers' shape (convolutions, then a chain of dense layers), uses the
given codec without measuring, and replaces layers. It is maintained for comparison with the papers.
"""
