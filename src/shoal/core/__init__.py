"""What a plan is and what it costs: steps, residences, schedules, the simulation, the rules, the file formats.

Plain data and functions over it, free of torch. Imports `shoal.errors` and nothing else of Shoal; only what
draws a `Plan` or a `Frontier`, or explains a plan, calls `shoal.report`, when it is called.
"""
