"""What runs inside a planned step: ops, each with its torch reference and the kernels that do it faster.

Imports `codecs` and `lowlevel`.
"""
