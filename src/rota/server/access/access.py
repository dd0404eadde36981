"""Access finds the key of a request, and decides what that key may use, see and spend."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

from fastapi import Request

from rota.core.adapter import Adapter, listed
from rota.core.errors import Fault, FaultCode, RequestError
from rota.runtime.blame import Blame
from rota.runtime.registry import Registry
from rota.server.access.audit import audited
from rota.server.access.disclosure import FOR_OTHERS, fault_for, reason_for
from rota.server.access.exposure import EVERY_SITE, is_local_name, is_own_origin
from rota.server.access.keys import ANYONE, PROBE, Key, KeyChanges, KeyRing
from rota.server.access.limits import CallDemand, Hold, KeyBalances, Limit, LimitUse, Met
from rota.server.errors import RetryLater

# ── admission ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Admission reserves what a call may take, refuses a call that meets a limit, and settles at the end.

# Called with the name of the key, the limit that a call has met, and the time.
OnMet = Callable[[str, str, float], None]


class KeyAdmission:
    """The limits of all keys, at the time that it is now."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = KeyBalances()
        self._now = now
        self._on_met: OnMet = lambda _key, _limit, _at: None

    def watch(self, on_met: OnMet) -> None:
        self._on_met = on_met

    def enter(self, key: Key) -> None:
        """Count a call as one request. Raises RATE_LIMITED, with the time to wait, if the minute is used up."""
        if met := self._limits.enter(key, self._now()):
            raise self._refusal(key, met, f"Key '{key.name}' may have {_described(key, met.limit)}")

    def admit(self, key: Key, ask: CallDemand, output_param: str | None, prompt_param: str) -> Hold:
        """Reserve what a call may take. The caller settles it.

        Raises RATE_LIMITED if the call does not fit now, and BAD_FIELD if it never does. `output_param` is the field
        with the client's limit of output tokens, if there is one.
        """
        admitted = self._limits.admit(key, ask, self._now())
        if isinstance(admitted, Hold):
            return admitted
        if admitted.wait_s is None:
            self._on_met(key.name, admitted.limit.value, self._now())
            raise _never(key, ask, admitted, output_param, prompt_param)
        asks = f"asks for {admitted.needed}" if admitted.limit is Limit.REQUESTS else f"reserves {admitted.needed}"
        limit = _described(key, admitted.limit)
        raise self._refusal(key, admitted, f"Key '{key.name}' may have {limit}, and this call {asks}")

    def settle(self, hold: Hold, used: int) -> None:
        """Give back what a call has not used. A second call changes nothing."""
        hold.settle(used, self._now())

    def charge(self, key: Key, tokens: int) -> None:
        """Count tokens of a call that reserves nothing, once they are known."""
        self._limits.charge(key, tokens, self._now())

    def used(self, key: Key) -> tuple[LimitUse, ...]:
        """How far the limits of a key are used up."""
        return self._limits.used(key, self._now())

    def _refusal(self, key: Key, met: Met, reason: str) -> RequestError:
        self._on_met(key.name, met.limit.value, self._now())
        wait_s = met.wait_s or 1
        again = "when an open answer has ended" if met.limit is Limit.IN_FLIGHT else f"in {wait_s} seconds"
        return RetryLater(Fault(FaultCode.RATE_LIMITED, f"{reason}; come back {again}."), wait_s)


def _described(key: Key, limit: Limit) -> str:
    match limit:
        case Limit.REQUESTS:
            return f"{key.requests_per_minute} requests a minute"
        case Limit.TOKENS:
            return f"{key.tokens_per_minute} tokens a minute"
        case Limit.IN_FLIGHT:
            return f"{key.max_tokens_in_flight} tokens in flight (max_tokens_in_flight)"
        case Limit.QUEUE:
            return f"{key.max_running} answers running (max_running) and {key.max_queued} waiting (max_queued)"


def _never(key: Key, ask: CallDemand, met: Met, output_param: str | None, prompt_param: str) -> RequestError:
    """A sentence without a time to come back: the same call would be refused again."""
    most = f"Key '{key.name}' may have {_described(key, met.limit)}, so this call can never be served"
    if met.limit in (Limit.REQUESTS, Limit.QUEUE):
        param, advice = prompt_param, "send fewer prompts at once, or lower n"
        taken = f"This call asks for {ask.answers} answers."
    elif output_param is None:
        param, advice = prompt_param, "send a shorter prompt"
        taken = f"This call has {ask.prompt_tokens} prompt tokens."
    else:
        param, advice = output_param, f"lower {output_param}, or send fewer or shorter prompts"
        taken = f"This call has {ask.prompt_tokens} prompt tokens and may have {ask.output_tokens} output tokens."
    return RequestError.bad_field(param, f"{taken} {most}; {advice}.")


class Right(Enum):
    """What a key must be allowed to ask a route, on a server that has keys, in the words of the documents."""

    NONE = "no key is needed"  # probes need no secret, and the dashboard's page holds no data
    ANY = "any"
    MODEL = "any that may use the model"
    OWN = "any, for requests of its own; with `may_operate` for all requests"
    LOAD = "`may_load`, the name on its list, and no other key's adapter"
    OPERATE = "`may_operate`"


# Characters of a name that a refusal repeats: enough to recognise it, and short.
MOST_REPEATED = 200


class Access:
    """Every route asks it first. Without keys, every client may do everything."""

    def __init__(
        self,
        registry: Registry,
        keys: KeyRing | None = None,
        load_refusal: str = "",
        now: Callable[[], float] = time.monotonic,
        own_name: str | None = None,
        allowed_origins: Collection[str] = (),
        blame: Blame | None = None,
    ) -> None:
        """`load_refusal` says why adapters are not loaded over HTTP, or is empty.

        With `own_name`, a server without keys answers only to that name and to this machine's own. An attacker can let
        a foreign name point to this machine. A browser would then treat the attacker's page as a page of this server.
        Pages of `allowed_origins` may use the server through a browser.
        """
        self._registry = registry
        self._keys = keys or KeyRing()
        self._load_refusal = load_refusal
        self.blame = blame or Blame()
        self.admission = KeyAdmission(now)
        self._own_name = own_name
        self.allowed_origins = frozenset(allowed_origins)

    def replace_keys(self, keys: KeyRing) -> KeyChanges:
        """Take new keys. A key that is not among them is refused from now on; its open requests go on."""
        changes = self._keys.changes_to(keys)
        self._keys = keys
        return changes

    def adapter_roots(self) -> dict[str, str | None]:
        """The roots of all keys that have one, each with the tenant whose it is; None: an operator's."""
        keys = [key for key in self._keys if key.adapter_root is not None]
        return {key.adapter_root or "": None if key.may_operate else key.name for key in keys}

    def guard(self, right: Right, is_question: bool = True) -> Callable[[Request], Coroutine[Any, Any, None]]:
        """What refuses a call to a route before it begins, as far as its key alone decides.

        An act checks `may_operate` itself, within its line of the audit log (`operating`), and so do routes whose right
        depends on a name in the call.
        """

        async def check(http: Request) -> None:
            if right is Right.NONE:
                self._refuse_pages(http, is_open=True)
                return
            http.state.key = self.key_of(http)
            if right is Right.OPERATE and is_question:
                self.operator_of(http)

        return check

    def key_of(self, http: Request) -> Key:
        """The key of a request. Raises UNAUTHORIZED without a known key, and FORBIDDEN for a page of another site."""
        self._refuse_pages(http)
        if not self._keys:
            self._refuse_foreign_names(http)
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

    def operator_of(self, http: Request, param: str | None = None) -> Key:
        """The key of a request that sees or changes the whole server, in the field `param` if only that field does.

        Raises FORBIDDEN without that right.
        """
        key = self.key_of(http)
        if not key.may_operate:
            message = f"Key '{key.name}' may not see or control the whole server; that needs may_operate."
            raise _refusal(FaultCode.FORBIDDEN, message, param)
        return key

    @contextmanager
    def operating(self, http: Request, act: str, **details: Any) -> Iterator[dict[str, Any]]:
        """An operator's act, with its line in the audit log, also for a key that may not. The block may add details."""
        with audited(http, self.key_of(http), act, **details) as told:
            self.operator_of(http)
            yield told

    def loader_of(self, http: Request, adapter: str) -> Key:
        """The key of a request to load or unload an adapter. Raises FORBIDDEN without that right, or for that name."""
        key = self.key_of(http)
        self.refuse_loader(key)
        if not key.may_use(adapter):
            message = f"Key '{key.name}' may not load or unload '{adapter[:MOST_REPEATED]}'; {self._names(key)}."
            raise _refusal(FaultCode.FORBIDDEN, message, _field_of_names(http))
        if not self._is_own(key, adapter):
            message = (
                f"Key '{key.name}' may use '{adapter[:MOST_REPEATED]}', but not load or unload it: it is not this "
                "key's own."
            )
            raise _refusal(FaultCode.FORBIDDEN, message, _field_of_names(http))
        return key

    def refuse_loader(self, key: Key) -> None:
        """Raises FORBIDDEN for a key that may load nothing."""
        if not key.may_load:
            raise _refusal(FaultCode.FORBIDDEN, f"Key '{key.name}' may not load or unload; that needs may_load.")
        if self.is_barred(key):
            message = (
                f"Key '{key.name}' may not load or unload: engines died of its adapters, which are quarantined. An "
                "operator may give that right back."
            )
            raise _refusal(FaultCode.FORBIDDEN, message)

    def is_barred(self, key: Key) -> bool:
        """Whether a tenant has lost the right to load."""
        return key.name in self.blame.barred and not key.may_operate

    def key_named(self, name: str) -> Key | None:
        """The key of a name as it is now; None: it is gone, or there are no keys."""
        return self._keys.named(name)

    def used_limits(self, name: str, admitted: int, waiting: int) -> tuple[LimitUse, ...]:
        """How far the key of a name has used up its limits, with so many answers that were admitted and that wait.

        Empty for a tenant that only a gateway knows.
        """
        key = self._keys.named(name)
        if key is None:
            return ()
        answers = (("max_running", admitted, key.max_running), ("max_queued", waiting, key.max_queued))
        held = (LimitUse(limit, used, most) for limit, used, most in answers if most is not None)
        return (*self.admission.used(key), *held)

    def is_open_to(self, name: str, adapter: Adapter) -> bool:
        """Whether the key of a name may use an adapter now."""
        key = self._keys.named(name)
        return key is not None and self._is_open(key, adapter)

    def may_change(self, key: Key, adapter: str) -> bool:
        """Whether `loader_of` would let this key load or unload the adapter."""
        may_load = key.may_load and not self.is_barred(key)
        return may_load and key.may_use(adapter) and self._is_own(key, adapter)

    def refuse_loads(self, key: Key, param: str = "lora_path") -> None:
        """Raises FORBIDDEN if adapters are not loaded over HTTP, or if this key has no folder to load from."""
        if self._load_refusal and key.adapter_root is None:
            raise _refusal(FaultCode.FORBIDDEN, self._load_refusal, param)
        if key.adapter_root is None and not key.may_operate:
            message = f"Key '{key.name}' has no adapter_root, so there is no folder that it may load from."
            raise _refusal(FaultCode.FORBIDDEN, message, param)

    def shown(self, http: Request, fault: Fault) -> Fault:
        """A refusal as the client may see it: why the engine is down is for operators, and so are most paths."""
        key = getattr(http.state, "key", None)
        if fault.code is FaultCode.ENGINE_DIED:
            return fault_for(key, fault)
        return replace(fault, message=reason_for(key, fault.message)) if fault.code in FOR_OTHERS else fault

    def find(self, key: Key, model: str | None, param: str = "model") -> Adapter:
        """As `named`; but a lost adapter is refused with its reason."""
        found = self.named(key, model, param)
        self.refuse_lost(key, found, param)
        return found

    def named(self, key: Key, model: str | None, param: str = "model") -> Adapter:
        """The model or adapter that a client names in the field `param`.

        A name that is not on the key's list is FORBIDDEN, also if it does not exist.
        """
        found = self._registry.get(model)
        if found is None:
            assert model is not None, "None is the base model"
            name = model.removeprefix(f"{self._registry.base.name}:")
            if key.may_use(model) or key.may_use(name):
                self.blame.refuse_name(name)
                message = (
                    f"There is no model or adapter named '{model[:MOST_REPEATED]}'; known are: {self._listed(key)}."
                )
                raise _refusal(FaultCode.UNKNOWN_MODEL, message, param)
        elif self._is_open(key, found):
            return found
        asked = self._registry.base.name if model is None else model
        message = f"Key '{key.name}' may not use '{asked[:MOST_REPEATED]}'; {self._names(key)}."
        raise _refusal(FaultCode.FORBIDDEN, message, param)

    def refuse_lost(self, key: Key, adapter: Adapter, param: str = "model") -> None:
        """Raises RequestError if an adapter is lost, with as much of the reason as the key may see."""
        try:
            self._registry.refuse_lost(adapter, param)
        except RequestError as error:
            raise RequestError(replace(error.fault, message=reason_for(key, error.fault.message))) from None

    @property
    def for_probes(self) -> Key:
        """What a client without a key may learn: with keys no paths."""
        return PROBE if self._keys else ANYONE

    def visible(self, key: Key) -> list[Adapter]:
        """The models that a key may use: the base model first, then adapters in the order of their loads."""
        return [one for one in (self._registry.base, *self._registry.adapters) if self._is_open(key, one)]

    def _refuse_pages(self, http: Request, is_open: bool = False) -> None:
        """Without keys, any web page could otherwise use a server that its visitor's browser reaches.

        Over plain HTTP to another machine browsers leave Sec-Fetch-Site out, so Origin is looked at too. They send it
        with all that a page can change something by.
        """
        headers = http.headers
        is_foreign = False
        if "origin" in headers:
            origin = ", ".join(headers.getlist("origin"))
            if self._is_allowed(origin):
                return
            is_foreign = not is_own_origin(origin, headers.get("host", ""))
        if not is_open:  # to what needs no key a page of another site may have a link
            is_foreign |= headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if is_foreign:
            message = (
                "Pages of other sites may not use this server through a browser; --allowed-origins names the sites "
                "whose pages may."
            )
            raise _refusal(FaultCode.FORBIDDEN, message)

    def _is_allowed(self, origin: str) -> bool:
        if EVERY_SITE in self.allowed_origins and self._keys:
            return "://" in origin  # not 'null'
        return origin != EVERY_SITE and origin in self.allowed_origins

    def _refuse_foreign_names(self, http: Request) -> None:
        host = http.headers.get("host", "")
        if self._own_name is not None and host and not is_local_name(host, self._own_name):
            message = (
                f"Without keys this server answers to localhost, not to '{host[:MOST_REPEATED]}'; give it --api-key, "
                "or --allow-anyone if every client that reaches it may do everything."
            )
            raise _refusal(FaultCode.FORBIDDEN, message)

    def _is_own(self, key: Key, name: str) -> bool:
        """Whether a key may change what a name means: no other key loaded it, and it is not the operator's."""
        if key.may_operate:
            return True
        loaded = self._registry.loaded(name)
        return loaded.owner == key.name if loaded else not self._registry.is_operators(name)

    def _is_open(self, key: Key, adapter: Adapter) -> bool:
        return key.may_use_base if adapter is self._registry.base else key.may_use(adapter.name)

    def _names(self, key: Key) -> str:
        return f"it may use: {self._listed(key)}"

    def _listed(self, key: Key) -> str:
        return listed(one.name for one in self.visible(key))


def _secrets_in(http: Request) -> set[str]:
    """The keys in the headers. One key sent twice is one key."""
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return {secret for secret in (bearer, http.headers.get("x-api-key", "").strip()) if secret}


def _field_of_names(http: Request) -> str:
    """Where a route takes the name of an adapter: in its path, or in a field of vLLM's and SGLang's."""
    return "name" if "name" in http.path_params else "lora_name"


def _refusal(code: FaultCode, message: str, param: str | None = None) -> RequestError:
    return RequestError(Fault(code, message, param))
