"""The HTTP front: what clients already send works, and what is not supported is refused with a sentence."""
