"""`shoal.split`: the first layers of a network on patches of its input (Split-CNN).

Imports `core`, `kernels`, `transforms.invert` and what all transforms share.
"""
