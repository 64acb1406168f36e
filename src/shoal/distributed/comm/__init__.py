"""How encoded bytes travel between ranks: messages, all-to-all, agreement on settings, traffic counts.

Imports `codecs` and `core`.
"""
