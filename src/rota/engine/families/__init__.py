"""Families of models, one file each: its spec, its layers, its forward pass, and what it cannot do."""
