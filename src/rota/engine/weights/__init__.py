"""Weights: from a folder's files to matrices on the device."""
