"""The parts that models are assembled from. A layer knows its share of a parallel group and its kernels."""
