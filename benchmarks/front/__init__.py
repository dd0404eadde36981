"""The parts of front_end.py: a device that only keeps time, a server around it, and clients that look at the clock."""
