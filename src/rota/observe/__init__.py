"""Events become numbers: summaries with percentiles."""
