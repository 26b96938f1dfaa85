"""What a verifier leaves for a draft head, computed as batches come or read from disk."""
