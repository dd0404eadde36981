"""The dashboard: events become a live page, and a journal becomes the same page once more."""
