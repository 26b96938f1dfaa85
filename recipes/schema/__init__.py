"""What a recipe may say, and how it is read from YAML. Runs nothing."""
