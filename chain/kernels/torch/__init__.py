"""The reference in PyTorch's operations, which defines the right results on every device."""
