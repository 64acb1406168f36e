"""Transforms of a module that keep its parameters, buffers and names: splitting its layers into patches."""
