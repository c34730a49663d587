"""`atom-plugin bench`: the speed of the core's kernels and of its decoding step on this GPU, next to the GPU's limits.

Measurements use random weights and no serving framework. The modules that measure need only torch, so they also run
without the command line's packages: `python -m atom_plugin.bench.step`.
"""
