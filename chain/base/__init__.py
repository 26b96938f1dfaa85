"""What knows no chain: errors, settings, caches, processes, and output for people."""
