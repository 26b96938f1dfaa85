"""Measures costs, simulates plans and chooses the fastest. Serves no requests."""
