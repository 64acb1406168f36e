"""Training on several devices: gradients, weights and activations in fewer bytes on the wire.

Imports `codecs`, `cost`, `offload`, `transforms`, `memory`, `lowlevel` and `core`.
"""

from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients.compress_gradients import CompressedGradients, compress_gradients
from shoal.distributed.weights.host_weights import HostWeights
from shoal.distributed.weights.precision import AdaptivePrecision
from shoal.distributed.weights.sharded_weights import ShardedWeights

__all__ = [
    "AdaptivePrecision",
    "CompressedGradients",
    "Exchange",
    "HostWeights",
    "ShardedWeights",
    "compress_gradients",
]
