"""What proposes candidates: draft heads, small models, n-grams. Verifies nothing."""
