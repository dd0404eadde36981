"""A model as an object in the calling process, and what every command needs to build an engine."""
