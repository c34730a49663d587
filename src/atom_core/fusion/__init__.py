"""Kernels that span several modules; no other package has them.

Layers and models are plain code: norm, token mixer, norm, feed-forward network, each a module from tensors to tensors.
This package runs the same modules' weights by kernels that do the work of several modules at once:

- residual addition, sum over tensor-parallel ranks and norm (:class:`.linear.StreamNorm`),
- norm, quantisation and product (:class:`.linear.NormedLinear`),
- product and residual addition (:class:`.linear.ResidualLinear`),
- gate/up product and gated activation (:mod:`.mlp`),
- norm and router, norm and experts, experts and residual addition (:mod:`.moe`).

:class:`.layers.FusedLayers` is built once from a model's layers and then runs in their place. It is not built where
hooks must see each module (``Runtime.fuse_modules`` is false); the modules then run by their own calls.
"""
