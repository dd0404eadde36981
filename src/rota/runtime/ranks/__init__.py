"""Ranks are the processes that compute one model together: rank 0 leads with plans, and the others follow."""
