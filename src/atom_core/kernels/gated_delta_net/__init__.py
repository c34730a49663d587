"""Gated DeltaNet (arXiv 2412.06464): linear attention whose state forgets by a gate and is corrected by the delta rule.

For each value head with a state ``S [V, K]``, a token's ``q, k [K]``, ``v [V]``, log decay ``g`` and ``beta``:

    S <- exp(g) S;    S <- S + beta (v - S k) k^T;    o = S q

``q`` and ``k`` are L2-normed, and ``q`` is multiplied by ``K^-0.5``. In front of them a depthwise causal convolution of
four taps, then silu, goes over ``q``, ``k`` and ``v``; after them comes an RMS norm over ``V``, gated by ``silu(z)``.
``g = -exp(A_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``. Value head ``h`` reads key head ``h // (Hv / Hk)``.

So far there is the reference alone (:mod:`.reference`): token by token, and in chunks. The state is float32, its value
dimension first, as vLLM and SGLang keep it.
"""
