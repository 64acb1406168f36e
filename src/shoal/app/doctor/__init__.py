"""One step of a user's own model, plain and planned, and what to make of it: `shoal doctor`.

Imports all of the library; `app.cli` imports it.
"""
