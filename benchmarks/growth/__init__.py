"""Grows small chains to shapes of large models, for measurements: same outputs, larger costs."""
