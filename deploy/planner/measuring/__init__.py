"""What plans are chosen from: costs of passes, and how well members agree."""
