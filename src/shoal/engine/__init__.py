"""One model under one budget: `compile`, the backend, `plan`, and the session that plans, meters and plans again.

Imports everything below it; only `shoal` itself and `app` import it.
"""
