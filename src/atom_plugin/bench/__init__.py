"""`atom-plugin bench`: how fast the core's kernels and its decoding step are on this GPU, beside the GPU's own limits.

Everything is measured without a serving framework, with random weights. What is measured is in plain modules that need
torch alone, so that it also runs where the command line's packages are missing: `python -m atom_plugin.bench.step`.
"""
