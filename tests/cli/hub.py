"""A Hugging Face hub with one model, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "millers/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "model.safetensors": b"weights", "photo.png": b"png"}


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{MODEL}/revision/"):
            siblings = [{"rfilename": name} for name in FILES]
            self._send(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/{MODEL}/tree/{COMMIT}":
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            self._send(json.dumps(files).encode())
        elif path.startswith(f"/{MODEL}/resolve/{COMMIT}/"):
            self._send(FILES[path.rpartition("/")[2]])
        else:
            # As the hub answers for what the token may not see, and for what does not exist.
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving_hub() -> Iterator[str]:
    """Serve, and return the hub's URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
