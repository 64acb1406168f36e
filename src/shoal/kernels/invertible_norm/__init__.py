"""Batch norm and its activation as one op that saves only its result (In-Place ABN).

Imports `kernels`, `kernels.norm` and `lowlevel`.
"""
