"""What both adapters support of models with linear attention, which keep a state for each request."""

from __future__ import annotations

#: Tokens that may be drafted: kernels that verify them take one more at most.
MOST_DRAFTS = 7
#: Dtypes of the states, and in SGLang of the inputs that their convolutions keep.
STATE_DTYPES = ("float32", "bfloat16")
