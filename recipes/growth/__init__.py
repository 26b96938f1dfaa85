"""Small chains in the shapes of large models, for measurements: outputs stay, costs grow."""
