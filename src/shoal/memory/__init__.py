"""Bytes of a device: a limit on them, what a step really uses, what is in use besides, and where it lies.

Imports `lowlevel` and `core`.
"""
