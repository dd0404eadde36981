"""Answers: from the events of an engine to the bytes that a client reads."""
