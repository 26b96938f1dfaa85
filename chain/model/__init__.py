"""Decoders and draft heads: weights are loaded, layers run. Knows no chain and no sampling."""
