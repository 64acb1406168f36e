"""Batch norm fused with its neighbours (BN fission-n-fusion): statistics, normalise, convolve, and their gradients.

Imports `kernels` and `lowlevel`.
"""
