"""Ranks of tensor parallel on one GPU: what each computes, whether they agree, and what can be captured."""
