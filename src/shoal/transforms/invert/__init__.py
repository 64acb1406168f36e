"""`shoal.invert_norm`: norms that save only their results (In-Place ABN).

Imports `core`, `kernels`, `lowlevel` and what all transforms share.
"""
