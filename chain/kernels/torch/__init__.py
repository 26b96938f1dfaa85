"""The reference in PyTorch's operations, which decides what is right on every device."""
