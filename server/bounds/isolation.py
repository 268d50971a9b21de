"""Keeps the clients of a server apart in the engine: whose turn a request takes, and whose cached prefixes it shares.

    isolation = Isolation(settings)
    isolation.client(key)                    # requests of one client wait for each other, clients take turns
    isolation.cache_salt(key, body.cache_salt)       # requests with the same salt share cached prefixes

A cached prefix makes an answer begin sooner, and `cached_tokens` reports it. A client that shared the prefixes of another one
could therefore guess the other's prompts piece by piece. The salt is a hash of the API key's hash with a secret of this
process. On a server without keys, all requests belong to one client.

With a folder of pages (`kv_host_folder`), salts have no secret, because a later process must find the pages of this one. The
salt is part of the hashes of pages. The engine keys these hashes with the secret of the folder, and no file contains the salt.
"""

from __future__ import annotations

import hashlib
import secrets

from ..settings import Settings


class Isolation:
    """The settings `prefix_sharing` and `priority_scope`, applied to a request."""

    def __init__(self, settings: Settings):
        self._sharing = settings.prefix_sharing
        self._scope = settings.priority_scope
        self._secret = secrets.token_bytes(32)
        self._salt_secret = self._secret if settings.kv_host_folder is None else b""

    def client(self, key: str | None) -> str | None:
        """The name under which the engine accounts for the requests of an API key's hash."""
        return None if key is None or self._scope == "global" else _hash(self._secret, key, None)

    def cache_salt(self, key: str | None, salt: str | None) -> str | None:
        """The engine's salt for a request with this `cache_salt`. All requests for which it is None share their prefixes."""
        if self._sharing == "none":
            return secrets.token_hex(16)
        owner = key if self._sharing == "key" else None
        return None if owner is None and salt is None else _hash(self._salt_secret, owner, salt)


def _hash(secret: bytes, *values: str | None) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=16, key=secret).hexdigest()
