"""The method: stages, verification, draft trees, sampling. Knows token ids, no text, no files."""
