"""What runs inside a planned step: kernels and their references, transfers to the host, arenas, meters and the memory
limit. Nothing here chooses; plans do.
"""
