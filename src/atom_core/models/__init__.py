"""One family a file, assembled from layers; :mod:`atom_core.models.registry` maps architecture names to them."""
