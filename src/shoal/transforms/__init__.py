"""From a module to a module with the same parameters, buffers and names: split, fuse, invert; and what they share.

Imports `core` and `lowlevel`; its folders import `kernels` too.
"""
