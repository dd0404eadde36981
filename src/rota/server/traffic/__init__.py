"""Traffic: a name's requests go to several versions or adapters, by weight."""
