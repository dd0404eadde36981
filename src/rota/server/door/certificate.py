"""A certificate and its key are read at the start, and again when their files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat

from rota.core.config import ListenConfig
from rota.core.errors import ConfigError

LOG = logging.getLogger("rota.server")

POLL_S = 10.0

Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """Has the TLS context of new connections. Open connections keep the context that they began with."""

    def __init__(self, certificate: str, key: str) -> None:
        """Raises ConfigError if the two files cannot be used together."""
        self._certificate, self._key = certificate, key
        self.reload()

    def reload(self) -> None:
        """Read both files again. Raises ConfigError, and then the former certificate stays in use."""
        self._seen = self._stamp()  # before the files are read: a change meanwhile is seen at the next look
        self.context = _context(self._certificate, self._key)

    def reload_if_changed(self) -> None:
        """Read changed files again. A pair that cannot be used is logged, and tried when it changes again."""
        if self._stamp() == self._seen:
            return
        try:
            self.reload()
            LOG.info("The certificate was read again.", extra={"fields": {"file": self._certificate}})
        except ConfigError as error:
            LOG.warning("The former certificate stays in use.", extra={"fields": {"why": str(error)}})

    async def watch(self) -> None:
        """Look at the files now and then, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.reload_if_changed()

    def _stamp(self) -> Stamp:
        return tuple(map(_stamp_of, (self._certificate, self._key)))


def find_certificate(config: ListenConfig) -> Certificate | None:
    """The certificate of a server that speaks HTTPS, or None. Raises ConfigError."""
    if config.ssl_certfile is None:
        return None
    return Certificate(config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile)


def _context(certificate: str, key: str) -> ssl.SSLContext:
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
        except OSError as error:
            raise ConfigError(f"Cannot read {path} of {flag}: {error.strerror}.") from error
    _check_permissions(key, mode)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except ssl.SSLError as error:
        raise ConfigError(_explained(certificate, key, error)) from error
    return context


def _check_permissions(key: str, mode: int) -> None:
    """The group of the key's file may read it, because containers mount secrets that way. Other users may not."""
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"Every user of this machine may read or write {key}, which has a private key; chmod o-rw.")


def _refuse_password(key: str) -> str:
    """Called for a key with a password. OpenSSL would otherwise ask for it on the terminal."""
    raise ConfigError(f"The key in {key} has a password; take it off (openssl pkey -in {key} -out FILE).")


def _explained(certificate: str, key: str, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return (
            f"The key in {key} does not belong to the certificate in {certificate}; give the pair of one certificate."
        )
    return f"{certificate} and {key} do not hold a certificate and its private key in PEM format ({error.reason})."


def _stamp_of(path: str) -> tuple[int, int, int]:
    """Changes with every change of a file, also of a link to it, or of its permissions."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_ctime_ns)
