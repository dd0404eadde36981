"""`python -m rota.runtime.ranks` is a follower's process."""

from __future__ import annotations

from rota.runtime.ranks.follower import main

main()
