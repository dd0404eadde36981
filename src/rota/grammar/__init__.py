"""Schemas, regular expressions and grammars become masks over the vocabulary."""
