"""Every Triton kernel compiles for the GPUs that we name, as its launcher launches it: a file an op."""
