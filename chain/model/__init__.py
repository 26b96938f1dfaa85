"""Decoders and draft heads: loads weights and runs layers. Knows no chains and no sampling."""
