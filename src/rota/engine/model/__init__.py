"""The model: what a folder describes, its rotary table, its matrices and its forward pass."""
