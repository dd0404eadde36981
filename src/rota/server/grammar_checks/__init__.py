"""Grammars are checked in processes that can be ended, before a request with one is sent to an engine."""
