"""The attention backend: SGLang's batches and pools on one side, the core's metadata and kernels on the other."""
