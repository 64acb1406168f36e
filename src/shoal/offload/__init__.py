"""Bytes on their way to the host: links, transfers of planned steps, and the eager way.

Imports `core`.
"""
