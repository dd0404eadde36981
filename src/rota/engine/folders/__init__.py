"""Model folders: the built-in model's, and those that a hub has."""
