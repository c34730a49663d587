"""Layers that models are built from. A layer knows its share of a parallel group and its kernels."""
