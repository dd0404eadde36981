"""Worker processes read large bodies, so that the event loop and the engine never wait for one."""
