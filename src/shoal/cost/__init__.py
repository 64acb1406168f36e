"""Seconds and bytes of every op of a step, of this machine (measured, cached on disk) or of another (roofline model).

Imports `capture`, `graph`, `lowlevel`, `memory`, `offload` and `core`.
"""
