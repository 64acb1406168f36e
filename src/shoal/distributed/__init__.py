"""Training on several devices: gradients, weights and activations in fewer bytes on the wire.

Imports `codecs`, `cost`, `offload`, `transforms`, `lowlevel` and `core`. The parallelism of the papers is in `papers`.
"""

from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients.compress_gradients import CompressedGradients, compress_gradients
from shoal.distributed.papers.activation_exchange import ActivationExchange
from shoal.distributed.papers.hybrid import hybrid
from shoal.distributed.papers.local_convolution import LocalConv2d
from shoal.distributed.weights.host_weights import HostWeights
from shoal.distributed.weights.precision import AdaptivePrecision, NormMonitor
from shoal.distributed.weights.sharded_weights import ShardedWeights

__all__ = [
    "ActivationExchange",
    "AdaptivePrecision",
    "CompressedGradients",
    "Exchange",
    "HostWeights",
    "LocalConv2d",
    "NormMonitor",
    "ShardedWeights",
    "compress_gradients",
    "hybrid",
]
