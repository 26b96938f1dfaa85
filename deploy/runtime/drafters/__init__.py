"""Drafters, which propose candidates: draft heads, small models, n-grams. Verifies nothing."""
