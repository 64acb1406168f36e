"""Hybrid parallelism of 8-bit approximations (Dettmers): data parallel convolutions, model parallel linear layers.

Imports `distributed.comm`, `transforms`, `codecs` and `core`.
"""
