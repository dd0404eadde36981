"""Who may ask for what: keys, their rights and their limits."""
