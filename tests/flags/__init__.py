"""Flags and request parameters beside native: `nox -s flags`, or `python -m tests.flags vllm` in an environment.

One case is one line of `vllm_cases.py` or `sglang_cases.py`: what an engine is given, and what it is asked. Each runs
natively and with our models, on a CPU in float32, and answers are compared with their log probabilities.
"""
