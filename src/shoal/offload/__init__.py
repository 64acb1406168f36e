"""Offloading to the host: links, the transfers of a planned step, and `offload_activations` for eager mode.

Imports `lowlevel` and `core`.
"""
