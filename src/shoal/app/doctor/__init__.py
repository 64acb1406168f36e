"""One step of a user's own model, plain and planned, and what to make of it: `shoal doctor`.

Imports the public names of the library, `core`, `lowlevel`, `memory` and `errors`.
"""
