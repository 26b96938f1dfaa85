"""Rounds that stay on the device, captured in CUDA graphs. Decides nothing that stages do not."""
