"""The small operations between matrix products, in one family per purpose."""
