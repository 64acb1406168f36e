"""From a module to a captured step, and from a plan back to two graphs: the only reader and writer of FX step graphs.

Imports `rewrites`, `graph`, `kernels`, `codecs`, `offload`, `transforms`, `lowlevel` and `core`.
"""
