"""Executors of passes: PyTorch, C++ and Triton. Know rows and tensors, but no files or models."""
