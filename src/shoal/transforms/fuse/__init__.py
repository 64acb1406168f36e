"""`shoal.fuse_batchnorm`: batch norms done by the convolutions around them (BN fission-n-fusion).

Imports `kernels` and what all transforms share.
"""
