"""What runs inside a planned step: ops, each with its torch reference and faster kernels.

Imports `codecs`, `lowlevel` and `core`.
"""
