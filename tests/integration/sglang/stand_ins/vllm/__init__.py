"""Not vLLM: SGLang's own models look here for one function when they run on a CPU without SGLang's CPU engine."""
