"""Passes whose every number stays on the device: what CUDA graphs can be captured of."""
