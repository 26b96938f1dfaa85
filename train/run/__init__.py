"""A training run: processes, steps, checkpoints, metrics and its end. Knows no loss."""
