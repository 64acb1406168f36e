"""An iteration: forward and backward passes of captured graphs between two moments without a pending backward pass.

`graphs` compiles each graph for its place, `record` notes what passes hand to each other, `metered` what was in use
meanwhile, `first` bounds the first run, `plan` makes one plan for all, `variants` finds the best variants, `known`
remembers an iteration that has run, `planned` plans it, `run` follows the calls of the models.

Imports `engine` below it, `capture`, `core`, `cost`, `kernels`, `lowlevel`, `memory`, `offload` and `planners`.
"""
