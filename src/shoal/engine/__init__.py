"""One model under one budget, or several that share it: `compile`, the backend, `plan`, sessions that plan and meter.

Imports everything below it; only `shoal` itself and `app` import it.
"""
