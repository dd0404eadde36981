"""Adapters on the device: checkpoints, the bank that holds them in slots, and the operations that apply them."""
