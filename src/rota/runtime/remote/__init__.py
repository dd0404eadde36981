"""An engine on another machine speaks to its front over TCP, encrypted, and is started there by a cluster."""
