"""Folders that hold a model: the built-in one, and one that a hub has."""
