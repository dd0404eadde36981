"""The body that sets a traffic route, and the body that shows one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from rota.core.errors import RequestError
from rota.server.access.access import MOST_REPEATED
from rota.server.fields import Fields
from rota.server.traffic.route import Route
from rota.server.traffic.split import MOST_TARGETS, Split, check_weights

Weight = Annotated[float, Field(json_schema_extra={"minimum": 0.0, "maximum": 1.0})]


class RouteFields(Fields):
    """Where the requests of a name go. Weights sum to 1.

    A target is `name@version`, or a name, which means that name's current version. `rollback` takes all requests if
    another target fails; left out, it is the target with the largest weight. `shadow` gets copies whose answers are
    dropped.
    """

    targets: dict[str, Weight] = Field(json_schema_extra={"minProperties": 1, "maxProperties": MOST_TARGETS})
    rollback: str | None = None
    shadow: str | None = None

    def route(self, name: str) -> Route:
        """Raises RequestError for weights that do not sum, and for a shadow that is a target too."""
        check_weights(self.targets)
        if self.shadow is not None and self.shadow in self.targets:
            message = (
                f"shadow: '{self.shadow[:MOST_REPEATED]}' is one of the targets, so it answers such requests already."
            )
            raise RequestError.bad_field("shadow", message)
        heaviest = max(self.targets, key=lambda target: self.targets[target])
        return Route(name=name, split=Split(self.targets), rollback=self.rollback or heaviest, shadow=self.shadow)

    @property
    def written(self) -> str:
        """The targets for a log."""
        return ", ".join(f"{target} {weight:g}" for target, weight in list(self.targets.items())[:MOST_TARGETS])

    @property
    def places(self) -> list[tuple[str, str]]:
        """Each name in the body, with its place."""
        others = {"rollback": self.rollback, "shadow": self.shadow}
        named = [(place, name) for place, name in others.items() if name is not None]
        return [*((f"targets.{target[:MOST_REPEATED]}", target) for target in self.targets), *named]


class RolledBackBody(BaseModel):
    """Why and when all requests went to one target, and the weights before."""

    reason: str
    at: float
    targets: dict[str, float]


class RouteBody(BaseModel):
    """Where the requests of a name go, and how many went there since the route was set."""

    name: str
    targets: dict[str, float]
    rollback: str
    shadow: str | None
    shadow_ended: str | None
    rolled_back: RolledBackBody | None
    requests: dict[str, int]


class RoutesBody(BaseModel):
    """All traffic routes that a key may see."""

    data: list[RouteBody]


def shown(route: Route) -> dict[str, Any]:
    back = route.rolled_back
    return {
        "name": route.name,
        "targets": route.split.weights,
        "rollback": route.rollback,
        "shadow": route.shadow,
        "shadow_ended": route.shadow_ended or None,
        "rolled_back": back and {"reason": back.reason, "at": back.at, "targets": dict(back.targets)},
        "requests": route.requests,
    }
