"""Policies are pure decisions: they read views and `now`, give verdicts, and do not know each other."""
