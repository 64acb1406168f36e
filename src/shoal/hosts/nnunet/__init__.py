"""nnU-Net: a trainer and experiment planners inside a byte budget. `python -m shoal.hosts.nnunet install` makes
nnU-Net's own commands find them.

Imports `core`, `engine`, `memory`.
"""
