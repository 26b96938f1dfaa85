"""Conversations that the project generates itself, so that the default recipe needs no download."""
