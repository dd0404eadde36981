"""The small operations between matrix products: a plain, a CPU and a fused version."""
