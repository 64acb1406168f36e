"""Device memory: limits, the measured peak of a step, static memory, and planned addresses (`layout`).

Imports `lowlevel` and `core`.
"""
