"""The scheduler decides: it is the only writer of queues, ledgers and sequences."""

from rota.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
