"""Conversations to features to draft heads. Writes heads."""
