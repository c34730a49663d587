"""Thin adapters that bring the models of `atom_core` to vLLM and SGLang.

Importing this package imports no framework and no torch.
"""
