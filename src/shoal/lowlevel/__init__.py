"""Every private API of torch, the native library, C++ extensions, Triton launches, and which kernel of an op runs.

Imports `core`.
"""
