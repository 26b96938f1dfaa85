"""Kinds of draft heads: what each one's files say and hold, in a file of its own."""
