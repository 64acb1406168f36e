"""Weights in fewer bytes on the way to where they are used: host weights, sharded weights, A2DTWP's precision.

Imports `distributed.comm`, `cost`, `offload`, `codecs`, `lowlevel` and `core`.
"""
