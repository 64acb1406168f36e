"""What `shoal train` runs: a plain training loop with checkpoints that resume bit for bit.

Imports all of the library, `app.data` and `app.models`.
"""
