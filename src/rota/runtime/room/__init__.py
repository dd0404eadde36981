"""The reading room: processes that read what tenants have sent, and that can be ended in the middle of it."""
