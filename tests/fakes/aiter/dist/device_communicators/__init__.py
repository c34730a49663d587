"""Communicators of one group of GPUs."""
