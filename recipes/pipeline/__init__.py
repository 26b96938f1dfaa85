"""The stages of a recipe, each run once. Knows no command line."""
