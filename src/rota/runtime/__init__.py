"""The crank: one loop, the worlds' waist, and the engine's process."""
