"""Attention layers: the part of a model that knows where keys and values live."""
