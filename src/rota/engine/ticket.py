"""A ticket stands for a step under way."""

from __future__ import annotations

from dataclasses import replace

from rota.core.plan import NO_TOKEN, StepResult
from rota.engine.sampling.guides import Guided
from rota.engine.step.results import Copied

Faults = tuple[tuple[int, str], ...]  # by position


class Ticket:
    """Its results are on their way to the host once it is drawn."""

    def __init__(self, guided: Guided = ()) -> None:
        self.guided = guided
        self.began_at = self.host_s = 0.0  # when its submission began, and what the host took for that
        self._copied: Copied | None = None
        self._faults: Faults = ()

    def complete(self, copied: Copied, faults: Faults = ()) -> None:
        """The step is drawn; rows with a fault get no token."""
        self._copied = copied
        self._faults = faults

    def wait(self) -> StepResult:
        """Blocks until the step is done, and for no step after it."""
        assert self._copied is not None, "steps are collected in their order, so this one is drawn"
        result = self._copied.wait()
        if not self._faults:
            return result
        failed = dict(self._faults)
        tokens = tuple(NO_TOKEN if at in failed else token for at, token in enumerate(result.tokens))
        return replace(result, tokens=tokens, faults=self._faults)
