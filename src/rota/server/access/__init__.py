"""Keys, their rights and their limits."""
