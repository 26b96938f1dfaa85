"""What answers in a benchmark: this runtime, transformers, and the list of all systems."""
