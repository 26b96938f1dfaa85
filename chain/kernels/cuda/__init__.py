"""Triton kernels for NVIDIA GPUs, each with the result of its twin in PyTorch's operations."""
