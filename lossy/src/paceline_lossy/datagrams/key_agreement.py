"""Agrees on a secret with every other rank through a store that others may read: Diffie-Hellman.

Each rank publishes g^x and keeps x. The store's values carry the job's code (`SealedStore`), so under `paceline run`
nobody else can have written them; whoever merely reads the store learns no secret.

Source:
    Diffie & Hellman 1976; the group is number 14 of RFC 3526, section 3.
"""

from __future__ import annotations

import hashlib
import secrets

_PRIME = int(
    "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74"
    "020bbea63b139b22514a08798e3404ddef9519b3cd3a431b302b0a6df25f1437"
    "4fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
    "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf05"
    "98da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f356208552bb"
    "9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
    "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9de2bcbf695581718"
    "3995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
    16,
)
_GENERATOR = 2
_EXPONENT_BITS = 256


class KeyAgreement:
    """One rank's side.

    Attributes:
        public: To be published, in hexadecimal.
    """

    def __init__(self) -> None:
        self._exponent = secrets.randbits(_EXPONENT_BITS) | 1 << (_EXPONENT_BITS - 1)
        self.public = f"{pow(_GENERATOR, self._exponent, _PRIME):x}"

    def secret_with(self, public: str) -> bytes:
        """Return the 32 bytes that only this rank and the one that published `public` can compute.

        Raises ValueError if that is not what a rank publishes.
        """
        theirs = int(public, 16)
        if not 1 < theirs < _PRIME - 1:
            raise ValueError(f"{public[:20]}... is not a member of the group")
        shared = pow(theirs, self._exponent, _PRIME)
        return hashlib.sha256(b"paceline bounded loss " + shared.to_bytes(256, "big")).digest()
