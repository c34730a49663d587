"""A back end for Triton called "cpu", for tests: with it vLLM takes its newer model runner on a CPU.

That runner's kernels are Triton's, and run in Triton's interpreter (TRITON_INTERPRET=1), which needs no back end. A
folder with this package and its metadata on PYTHONPATH is all it takes.
"""
