"""From a module to a module with the same parameters, buffers and names: split, fuse, invert; and what they share.

Imports nothing but `shoal.errors` itself; its folders import `kernels` and `lowlevel`.
"""
