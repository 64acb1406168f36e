"""What the nodes of a step's joint graph are: views, sizes, what they cost, how they run again and in place.

Imports `transforms` and `kernels`.
"""
