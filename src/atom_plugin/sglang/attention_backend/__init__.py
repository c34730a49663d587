"""The attention backend: SGLang's batches and pools on one side, the core's batch and kernels on the other."""
