"""Whether tokenizer and replicas make block digests with one key, and with a secret one where tenants are kept apart.

Digests of two keys never match: a replica of another key would look as if it cached nothing. And where the key is known
to everybody, a digest, which Redis shows, tells whether a guessed prompt is the one behind it.
"""

from __future__ import annotations

import structlog

from kvern.services.router.replica import Replica
from kvern.services.router.tokenizer import Tokenizer

_log = structlog.get_logger("kvern.router")


class DigestKeys:
    """Judges by what tokenizer and replicas say, and logs each trouble once."""

    def __init__(self, tokenizer: Tokenizer, must_be_secret: bool) -> None:
        """must_be_secret: what has no secret key, or another one than the tokenizer, gets no requests."""
        self._tokenizer = tokenizer
        self._must_be_secret = must_be_secret
        self._told: set[tuple[str, str]] = set()

    @property
    def has_right_tokenizer(self) -> bool:
        """Whether the tokenizer's key will do."""
        if not self._must_be_secret or self._tokenizer.digest_key:
            return True
        if self._tokenizer.digest_key is not None:
            self._tell("tokenizer", "not ready: tenants need a secret digest key; give the tokenizer digest_key_file")
        return False

    def allows(self, replica: Replica) -> bool:
        """Whether requests may go to a replica."""
        trouble = "" if replica.engine is None else self._trouble(replica.engine.digest_key)
        if trouble:
            self._tell(replica.address, trouble)
        else:
            self._told = {told for told in self._told if told[0] != replica.address}
        return not trouble or not self._must_be_secret

    def _trouble(self, key: str) -> str:
        if self._must_be_secret and not key:
            return "replica left out: tenants need a secret digest key; give its engine digest_key_file"
        if self._tokenizer.digest_key is not None and key != self._tokenizer.digest_key:
            return "the replica has another digest key than the tokenizer: its cached blocks are never found"
        return ""

    def _tell(self, who: str, trouble: str) -> None:
        if (who, trouble) not in self._told:
            self._told.add((who, trouble))
            _log.error(trouble, of=who)
