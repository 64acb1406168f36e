"""Every codec of the registry, with the options it cannot do without, for tests that read the sheets."""

from __future__ import annotations

from shoal import codecs
from shoal.codecs import Codec
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.table_codec import TableCodec

POOL = {"input_shape": (2, 3, 8, 8), "kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
NEEDED: dict[str, dict] = {"pool_index": POOL}
# In addition to the defaults: a block for all, small blocks, a scale of one's own, an exponent offset.
OTHERS = (
    codecs.get("dynamic_tree", block=None),
    codecs.get("linear", block=8),
    codecs.get("dynamic_tree_even", scale=3.0),
    codecs.get("static_tree", exponent_offset=1),
    codecs.get("mantissa", exponent_offset=1, block=None),
    codecs.get("one_bit", block=8),
    codecs.get("one_bit", block=None),
)
CODECS = (*(codecs.get(name, **NEEDED.get(name, {})) for name in codecs.names()), *OTHERS)
FLOAT_CODECS = tuple(codec for codec in CODECS if isinstance(codec, FloatCodec))
TABLE_CODECS = tuple(codec for codec in CODECS if isinstance(codec, TableCodec))


def name_of(codec: Codec) -> str:
    return str(codec)
