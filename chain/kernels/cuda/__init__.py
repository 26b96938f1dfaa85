"""Triton kernels for NVIDIA GPUs, each with the result of its twin in PyTorch's operations."""

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""That the kernels compute in; others are left to PyTorch's operations."""
