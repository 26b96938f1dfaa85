"""What computes a pass: PyTorch, C++ or Triton. Knows rows and tensors, no files and no models."""
