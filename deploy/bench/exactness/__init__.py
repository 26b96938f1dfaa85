"""Whether answers are the target's: token for token, by their law, and up to rounding."""
