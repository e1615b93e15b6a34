"""Runs compiled kernels on a CPU, in numpy: their numbers, their races, their memory traffic. See ``simulate``."""
