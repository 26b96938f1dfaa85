"""Rounds that run on the device as CUDA graphs. Follows the stages; decides nothing of its own."""
