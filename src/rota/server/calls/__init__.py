"""What a call asks for: its names and fields, its prompts, and how they are read."""
