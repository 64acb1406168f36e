"""The program `shoal`: command line, training loop, data sets, networks. Nothing of the library imports it.

Imports all of the library; nothing imports it.
"""
