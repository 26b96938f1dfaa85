"""What a run would take, from counts and published speeds. Runs no model."""
