"""The door accepts connections, counts them, and gives each its limits and deadlines."""
