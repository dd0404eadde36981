"""How a folder's tensors get to a GPU: read by several threads, and copied from pinned memory."""
