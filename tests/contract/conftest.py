"""The contracts with vLLM are for an environment that has it; named on the command line elsewhere, nothing is found."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]
