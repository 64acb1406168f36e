"""How encoded bytes are sent between ranks: messages, all-to-all, agreement on settings, traffic counts.

Imports `codecs`, `lowlevel` and `core`.
"""
