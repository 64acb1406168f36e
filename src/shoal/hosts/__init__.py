"""Trainers of others: what Shoal adds for them. Each module is imported by whoever uses its host.

Imports `core`, `engine`, `memory`; nothing imports it.
"""
