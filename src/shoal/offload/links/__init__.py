"""Links that are open: how bytes really go from a device to its host and back.

`shoal.core.hardware.Link` says how fast a link is; here are the real ones, with one interface (`open_link.OpenLink`):
CUDA to pinned host memory on two side streams, CPU to a slab of host memory or to a file by two threads. Host bytes
come from a pool of slabs that are made once and leased to one step after another.
"""
