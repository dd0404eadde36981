"""Tensor parallel: several ranks hold a part of each matrix, and add up what each of them computes."""
