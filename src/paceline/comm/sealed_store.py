"""A store's keys that only ranks of this job can have written: every value carries a code made with the job's token.

The store itself (torch's) lets anybody who reaches its port read, write and delete. A value without the right code is
as if it were not there, so a stranger can at most disturb. docs/explain/security.md says what that protects.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from paceline.comm import TOKEN

_PAUSE_S = 0.1


class SealedStore:
    """What this package keeps in a store. Same methods as torch's, of those that are needed.

    Args:
        store: Where.
        scope: What the keys are about; a value cannot be moved to another scope or key.
    """

    def __init__(self, store: dist.Store, scope: str) -> None:
        self._store = store
        self._scope = scope
        self._token = os.environ.get(TOKEN, "").encode()

    def set(self, key: str, words: str) -> None:
        self._store.set(key, f"{self._code(key, words.encode())} {words}")

    def get(self, key: str) -> bytes:
        """Return what a rank has written, which `check` has found.

        Raises:
            RuntimeError: It is not there, or not a rank's.
        """
        words = self._open(key)
        if words is None:
            raise RuntimeError(f"the value of {key} in the job's store was not written by a rank of this job")
        return words

    def check(self, keys: Sequence[str]) -> bool:
        """Whether ranks have written all of these."""
        return self._store.check(list(keys)) and all(self._open(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait for these keys; may return early. Raises at the timeout, as the store does."""
        self._store.wait(list(keys), timeout)
        if not self.check(keys):  # a stranger's; a rank's may still come
            time.sleep(min(_PAUSE_S, timeout.total_seconds()))

    def _open(self, key: str) -> bytes | None:
        code, _, words = self._store.get(key).partition(b" ")
        return words if hmac.compare_digest(code, self._code(key, words).encode()) else None

    def _code(self, key: str, words: bytes) -> str:
        text = b"\0".join([self._scope.encode(), key.encode(), words])
        return hmac.new(self._token, text, hashlib.sha256).hexdigest()[:32]
