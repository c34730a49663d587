"""Checkpoints with one thing changed: served as Transformers serves them, or refused by one line that says why."""
