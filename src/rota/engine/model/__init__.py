"""The model: its spec, its rotary table, its sites and its matrix products."""
