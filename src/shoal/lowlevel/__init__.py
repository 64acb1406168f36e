"""Every private API of torch, the native library, C++ extensions and launches of Triton kernels.

Imports `core`.
"""
