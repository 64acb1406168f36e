"""`shoal.fuse_batchnorm`: batch norms done by the convolutions around them (BN fission-n-fusion).

Imports `core`, `kernels`, `lowlevel`, `transforms.invert` and what all transforms share.
"""
