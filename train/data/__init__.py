"""Conversations as token ids, masks and batches. Knows no model."""
