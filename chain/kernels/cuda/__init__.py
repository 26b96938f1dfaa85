"""Triton kernels for NVIDIA GPUs, each equivalent to its counterpart in PyTorch's operations."""

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels compute in; others are left to PyTorch's operations."""
