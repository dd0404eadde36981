"""The exchange carries the prefill delayer's reports between replicas, through shared memory."""
