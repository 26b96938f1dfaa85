"""The runtime: caches, trees, verification, stages, benchmark. Reads chains."""
