"""What a plan is and what it costs: steps, residences, schedules, the simulation, the rules, the file formats.

Plain data and functions over it, free of torch. Imports `shoal.errors` and nothing else of Shoal; only
`Plan.save_html` and `Plan.save_trace` call `shoal.report`, when they are called.
"""
