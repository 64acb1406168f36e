"""What changes the joint graph of a captured step: one table of records, and their functions by theme.

Imports `graph`, `kernels`, `codecs`, `lowlevel` and `core`.
"""
