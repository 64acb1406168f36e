"""Static memory planning: an address in one arena for each block of a step, chosen before the step runs.

Imports `lowlevel` and `core`.
"""
