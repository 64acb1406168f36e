"""Compressed gradients: DDP and FSDP hooks, error feedback, and which codec pays on which link.

Imports `distributed.comm`, `codecs`, `memory`, `lowlevel` and `core`.
"""
