"""Triton kernels for NVIDIA GPUs, each equivalent to its counterpart in PyTorch's operations.

Triton launches on the current device, so every launch is within `torch.cuda.device_of` a tensor.
"""

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels compute in; others are left to PyTorch's operations."""
