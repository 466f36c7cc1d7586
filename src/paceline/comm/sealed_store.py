"""A store's keys that only ranks of this job can have written: every value carries a code made with the job's token.

The store itself (torch's) lets any process that reaches its port read, write and delete. A value without the right
code is as if it were not there, so a stranger can at most disturb. docs/explain/security.md says what that protects.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from datetime import timedelta

import torch.distributed as dist

from paceline.comm import TOKEN

_PAUSE_S = 0.1


class SealedStore:
    """A store with torch's methods whose values carry a code; a value fits one scope and key."""

    def __init__(self, store: dist.Store, scope: str) -> None:
        self._store = store
        self._scope = scope
        self._token = os.environ.get(TOKEN, "").encode()

    @property
    def port(self) -> int | None:
        """Return the port of the process that hosts the store; None if the store is no TCPStore."""
        store = self._store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store.port if isinstance(store, dist.TCPStore) else None

    def set(self, key: str, words: str) -> None:
        self._store.set(key, f"{self._code(key, words.encode())} {words}")

    def get(self, key: str) -> bytes | None:
        """Return what a rank has written; None if there is nothing, or something that is not a rank's."""
        if not self._store.check([key]):
            return None
        code, _, words = self._store.get(key).partition(b" ")
        return words if hmac.compare_digest(code, self._code(key, words).encode()) else None

    def wait(self, key: str, timeout: timedelta) -> bytes | None:
        """Wait for this key, and return as `get`; may return early. Raises at the timeout, as the store does."""
        self._store.wait([key], timeout)
        words = self.get(key)
        if words is None:  # a stranger's; a rank's may still come
            time.sleep(min(_PAUSE_S, timeout.total_seconds()))
        return words

    def _code(self, key: str, words: bytes) -> str:
        text = b"\0".join([self._scope.encode(), key.encode(), words])
        return hmac.new(self._token, text, hashlib.sha256).hexdigest()[:32]
