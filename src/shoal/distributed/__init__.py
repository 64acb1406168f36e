"""Training on several devices: what travels between them, and how long it takes."""

from shoal.distributed.activation_exchange import ActivationExchange
from shoal.distributed.exchange import Exchange
from shoal.distributed.gradients import CompressedGradients, compress_gradients
from shoal.distributed.host_weights import HostWeights
from shoal.distributed.hybrid import hybrid
from shoal.distributed.local_convolution import LocalConv2d
from shoal.distributed.precision import AdaptivePrecision, NormMonitor
from shoal.distributed.sharded_weights import ShardedWeights

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
