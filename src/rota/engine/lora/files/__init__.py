"""Adapter files: what PEFT saves, read and checked."""
