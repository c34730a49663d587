"""The one place where kernels reach over modules.

Layers and models are written plainly: a norm, what mixes tokens, a norm, a feed-forward network, each a module that
gives tensors. This package runs the same modules' weights by kernels that do the work of several of them at once:

- the residual sum, the sum over tensor-parallel ranks and a norm (:class:`.linear.StreamNorm`),
- a norm and the product that reads it, and what quantises between them (:class:`.linear.NormedLinear`),
- a product that adds to the residual (:class:`.linear.ResidualLinear`),
- the product of a gate and an up projection, and the gated activation (:mod:`.mlp`),
- a router behind its norm, experts behind theirs, and experts that add to the residual (:mod:`.moe`).

:class:`.layers.FusedLayers` is built of a model's layers, once, and then runs in their place. Where hooks are to see
each module (``Runtime.fuse_modules`` is false) it is not built, and the modules run by their own calls.
"""
