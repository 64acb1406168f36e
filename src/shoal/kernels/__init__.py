"""What runs inside a planned step: ops, each with its torch reference and faster kernels.

Imports `codecs`, `memory`, `lowlevel` and `core`.
"""
