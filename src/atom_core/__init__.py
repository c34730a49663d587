"""Models, attention and kernels for LLM inference, independent of the serving framework.

The packages below import one way only: ``models`` assemble ``layers`` and ``attention``, which call ``kernels``.
Nothing in here imports vLLM or SGLang, or asks which of them is running: what differs between frameworks comes in
through :class:`atom_core.runtime.Runtime`, which an adapter builds once and passes down.
"""
