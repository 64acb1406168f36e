"""Training on several devices: what travels between them, and how long it takes."""

from shoal.distributed.host_weights import HostWeights
from shoal.distributed.precision import AdaptivePrecision, NormMonitor
from shoal.distributed.sharded_weights import ShardedWeights

__all__ = ["AdaptivePrecision", "HostWeights", "NormMonitor", "ShardedWeights"]
