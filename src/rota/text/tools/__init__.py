"""Tools: how they are told to a model, and how its calls are read."""
