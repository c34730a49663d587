"""What must be settled before anything is imported.

Triton's interpreter, which runs kernels on a CPU: the choice is made when `triton` is first imported, and never again.
One thread: models of these sizes run several times faster than on two.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)
