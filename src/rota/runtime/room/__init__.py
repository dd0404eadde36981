"""The reading room: processes that read what anybody may have sent, and that can be ended in the middle of it."""
