"""An iteration: forward and backward passes of captured graphs between two moments without a pending backward pass.

`graphs` compiles each graph for its place, `meter` runs the passes and measures what lies between them, `record` notes
what they hand to each other, `first` bounds the first run, `plan` makes one plan for all, `known` remembers an
iteration that has run, `run` follows the calls of the models.

Imports `engine` below it, `capture`, `core`, `cost`, `kernels`, `lowlevel`, `memory`, `offload` and `planners`.
"""
