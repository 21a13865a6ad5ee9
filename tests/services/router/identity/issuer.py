"""A token issuer with an HTTP server for its keys."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://issuer.example"
AUDIENCE = "kvern"

Algorithm = jwt.algorithms.RSAAlgorithm | jwt.algorithms.ECAlgorithm | jwt.algorithms.OKPAlgorithm


class Issuer:
    """Signs tokens with a key of each kind; the key's id is the algorithm's name."""

    def __init__(self) -> None:
        self.rsa = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.private: dict[str, Any] = {
            "RS256": self.rsa,
            "ES256": ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate(),
        }
        self.url = ""
        self.num_fetches = 0
        self.answer: bytes | None = None
        """What the server says in place of the keys."""
        self.speaks_http = True
        """Or it says that without a head before it."""

    def jwks(self) -> bytes:
        algorithms = jwt.algorithms.get_default_algorithms()
        keys = []
        for kid, private in self.private.items():
            public = json.loads(algorithms[kid].to_jwk(private.public_key()))
            keys.append(public | {"kid": kid, "use": "sig"})
        return json.dumps({"keys": keys}).encode()

    def token(self, algorithm: str = "RS256", *, kid: str | None = None, **claims: object) -> str:
        """Return a token of tenant acme that is good for a minute. `claims` stand above its own; None drops one."""
        now = time.time()
        own = {"iss": ISSUER, "aud": AUDIENCE, "sub": "me", "exp": now + 60, "nbf": now - 1, "tenant": "acme"}
        given = {name: value for name, value in {**own, **claims}.items() if value is not None}
        return jwt.encode(given, self.private[algorithm], algorithm, headers={"kid": kid or algorithm})


@contextmanager
def serving_keys(issuer: Issuer) -> Iterator[Issuer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.num_fetches += 1
            if issuer.speaks_http:
                self.send_response(200)
                self.end_headers()
            self.wfile.write(issuer.answer if issuer.answer is not None else issuer.jwks())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        issuer.url = f"http://127.0.0.1:{server.server_address[1]}/keys"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield issuer
        finally:
            server.shutdown()
            thread.join()
