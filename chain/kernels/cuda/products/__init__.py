"""Products of a few rows on a GPU: kernels, their options, and which is fastest there."""
