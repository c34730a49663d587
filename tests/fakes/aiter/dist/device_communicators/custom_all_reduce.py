"""Where vLLM and SGLang look for it."""

from aiter._all_reduce import CustomAllreduce

__all__ = ["CustomAllreduce"]
