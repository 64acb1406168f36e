"""The program `shoal`: command line, training loop, data sets, networks. Nothing of the library imports it."""
