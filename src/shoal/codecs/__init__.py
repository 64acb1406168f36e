"""Tensors in fewer bytes, exactly as stated: `get(name).encode(tensor)`; `docs/codecs.md` says which to use.

Imports `lowlevel`.
"""

from shoal.codecs.codec import Codec, Encoded, Properties
from shoal.codecs.registry import Kind, from_bytes, get, names, register
from shoal.codecs.tables import Table

__all__ = ["Codec", "Encoded", "Kind", "Properties", "Table", "from_bytes", "get", "names", "register"]
