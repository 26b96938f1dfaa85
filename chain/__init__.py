"""The chain itself: manifest, model definitions and the 4-bit format. Knows tensors and files."""
