"""Variants of a step, each planned: what to encode, how to split, which batch still fits.

Imports `capture`, `graph`, `cost`, `planners`, `transforms`, `kernels`, `memory`, `lowlevel` and `core`.
"""
