"""Seconds and bytes of every op of a step, of this machine (measured, remembered on disk) or of another (roofline).

Imports `capture`, `codecs`, `kernels`, `lowlevel`, `offload` and `core`.
"""
