"""Open links: copies from a device to its host and back.

`shoal.core.hardware.Link` describes the speed of a link; these are the real ones, with one interface
(`open_link.OpenLink`): CUDA to pinned host memory on two side streams, CPU to host memory or to a file by two threads.
Host bytes come from a pool of slabs that are allocated once and leased to one step after another.

Imports `lowlevel` and `core`.
"""
