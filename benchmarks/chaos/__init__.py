"""The parts of the chaos run: a real server, clients of every manner, faults, and what must hold after each fault."""
