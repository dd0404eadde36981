"""Access decides whom a request comes from, and what that key may use, see and spend."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import Request

from rota.core.adapter import Adapter
from rota.core.errors import Fault, FaultCode, RequestError
from rota.runtime.registry import Registry
from rota.server.access.exposure import is_local_name
from rota.server.access.keys import ANYONE, Key, KeyRing
from rota.server.access.limits import Limits
from rota.server.errors import RetryLater

# Open to all, so that probes need no secret; the dashboard's page is only paper, its data needs a key.
OPEN_PATHS = frozenset({"/health", "/dashboard", "/docs", "/openapi.json"})

# Characters of a name that a refusal repeats: enough to recognise it, and no book is sent back.
MOST_REPEATED = 200


class Access:
    """What every route asks first. Without keys, anyone may do everything."""

    def __init__(
        self,
        registry: Registry,
        keys: KeyRing | None = None,
        load_refusal: str = "",
        now: Callable[[], float] = time.monotonic,
        own_name: str | None = None,
    ) -> None:
        """`load_refusal` says why nobody may load over HTTP, if nobody may.

        With `own_name`, a server without keys answers to that name and to this machine's own alone: a page from
        elsewhere whose name is made to lead here would look to the browser like a page of this server.
        """
        self._registry = registry
        self._keys = keys or KeyRing()
        self._load_refusal = load_refusal
        self._limits = Limits()
        self._now = now
        self._own_name = own_name

    async def guard(self, http: Request) -> None:
        """A dependency of the whole application: a route that forgets to ask is closed all the same."""
        if http.scope["path"] in OPEN_PATHS:  # not of `http.url`, which a Host header has a part in
            return
        if http.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            # Without keys nothing else would keep any page on the web from using a server on its visitor's machine.
            raise _refusal(FaultCode.FORBIDDEN, "Pages of other sites may not use this server through a browser.")
        self.key_of(http)

    def key_of(self, http: Request) -> Key:
        """Whose request it is; raises UNAUTHORIZED without a right key."""
        if not self._keys:
            self._refuse_strange_names(http)
            return ANYONE
        secrets = _secrets_in(http)
        if len(secrets) > 1:
            raise _refusal(FaultCode.UNAUTHORIZED, "Authorization and x-api-key hold different keys; send one of them.")
        if not secrets:
            message = "This server needs a key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise _refusal(FaultCode.UNAUTHORIZED, message)
        if key := self._keys.find(secrets.pop()):
            return key
        raise _refusal(FaultCode.UNAUTHORIZED, "This key is not known here.")

    def operator_of(self, http: Request) -> Key:
        """Whose request it is, for what shows or changes everybody's; raises FORBIDDEN without that right."""
        key = self.key_of(http)
        if not key.may_operate:
            message = f"Key '{key.name}' may not see or steer the whole server; that takes may_operate."
            raise _refusal(FaultCode.FORBIDDEN, message)
        return key

    def loader_of(self, http: Request, adapter: str) -> Key:
        """Whose request it is to load or unload an adapter; raises FORBIDDEN without that right, or for that name."""
        key = self.key_of(http)
        if not key.may_load:
            raise _refusal(FaultCode.FORBIDDEN, f"Key '{key.name}' may not load or unload; that takes may_load.")
        if not key.may_use(adapter):
            message = f"Key '{key.name}' may not load or unload '{adapter[:MOST_REPEATED]}'; {self._names(key)}."
            raise _refusal(FaultCode.FORBIDDEN, message, "lora_name")
        return key

    def refuse_loads(self) -> None:
        """Raises FORBIDDEN if nobody may load over HTTP, whatever their key."""
        if self._load_refusal:
            raise _refusal(FaultCode.FORBIDDEN, self._load_refusal, "lora_path")

    def find(self, key: Key, model: str | None, param: str = "model") -> Adapter:
        """Whom a client asks for, in the field `param`.

        A name that is not on the key's list is FORBIDDEN, whether it exists or not.
        """
        found = self._registry.get(model)
        if found is None:
            assert model is not None, "None is the base model"
            if key.may_use(model) or key.may_use(model.removeprefix(f"{self._registry.base.name}:")):
                message = (
                    f"There is no model or adapter named '{model[:MOST_REPEATED]}'; known are: {self._listed(key)}."
                )
                raise _refusal(FaultCode.UNKNOWN_MODEL, message, param)
        elif self._is_open(key, found):
            return found
        asked = self._registry.base.name if model is None else model
        message = f"Key '{key.name}' may not use '{asked[:MOST_REPEATED]}'; {self._names(key)}."
        raise _refusal(FaultCode.FORBIDDEN, message, param)

    def visible(self, key: Key) -> list[Adapter]:
        """What a key may use: the base model first, if it may, then adapters in the order they came."""
        return [one for one in (self._registry.base, *self._registry.adapters) if self._is_open(key, one)]

    def charge_request(self, key: Key) -> None:
        """Count a request; raises RATE_LIMITED, with when to come back, if the key has used up its minute."""
        if wait_s := self._limits.spend_request(key, self._now()):
            limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
            told = " and ".join(f"{limit} {kind}" for kind, limit in limits.items() if limit is not None)
            message = f"Key '{key.name}' may have {told} a minute; come back in {wait_s} seconds."
            raise RetryLater(Fault(FaultCode.RATE_LIMITED, message), wait_s)

    def charge_tokens(self, key: Key, tokens: int) -> None:
        """Count an answer's tokens, the prompt's too, once they are known."""
        self._limits.spend_tokens(key, tokens, self._now())

    def _refuse_strange_names(self, http: Request) -> None:
        host = http.headers.get("host", "")
        if self._own_name is not None and host and not is_local_name(host, self._own_name):
            message = (
                f"Without keys this server answers to localhost, not to '{host[:MOST_REPEATED]}'; give it --api-key, "
                "or --allow-anyone if whoever reaches it may do everything."
            )
            raise _refusal(FaultCode.FORBIDDEN, message)

    def _is_open(self, key: Key, adapter: Adapter) -> bool:
        return key.may_use_base if adapter is self._registry.base else key.may_use(adapter.name)

    def _names(self, key: Key) -> str:
        return f"it may use: {self._listed(key)}"

    def _listed(self, key: Key) -> str:
        return ", ".join(one.name for one in self.visible(key)) or "none"


def _secrets_in(http: Request) -> set[str]:
    """What the headers hold; one key sent twice is one key."""
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return {secret for secret in (bearer, http.headers.get("x-api-key", "").strip()) if secret}


def _refusal(code: FaultCode, message: str, param: str | None = None) -> RequestError:
    return RequestError(Fault(code, message, param))
