"""Events become numbers and lines: summaries, metrics, journals, logs."""
