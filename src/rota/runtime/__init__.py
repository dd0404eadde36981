"""The runtime: one loop for every world, the services around it, and the engine's process."""
