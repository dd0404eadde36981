"""A step: a plan's rows as tensors, in one copy, padded to a frame, replayed as a graph."""
