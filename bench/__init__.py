"""One module per figure or table: each prints a table, writes JSON and asserts that what it timed is right."""

import os

# Benches hold gradients against plain PyTorch bit for bit, and each measures one means; `bench.one_plan` names its own.
os.environ.setdefault("SHOAL_ALLOW", "bitwise")
