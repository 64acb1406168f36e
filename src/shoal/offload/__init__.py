"""Bytes on their way to the host: the eager way."""
