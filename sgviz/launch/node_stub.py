"""HealthStub: what a node that only runs schedulers answers over HTTP: whether it is ready, and who serves requests.

Mirrors SGLang's dummy health check server. Imports: config, serving (listeners), errors.
"""

from __future__ import annotations

import json
import ssl
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sgviz.config import HttpConfig, Settings
from sgviz.serving.listeners import open_port

HEALTH_PATHS = ("/health", "/health_generate")
READ_TIMEOUT_S = 10.0


class HealthStub:
    """Answers from construction to `close`; 503 until `why_not` is None.

    Raises:
        StartupError: host and port of the settings cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        parallel = settings.parallel
        self.why_not: str | None = "its schedulers are starting"
        self._node = f"node {parallel.node_rank} of {parallel.nnodes}"
        self._front = f"node 0, whose dist_init_addr is {parallel.dist_init_addr}"
        listener = open_port(settings.serve.host, settings.serve.port)
        self._server = ThreadingHTTPServer(listener.getsockname(), self._handler(), bind_and_activate=False)
        self._server.socket.close()
        self._server.daemon_threads = True
        tls = _tls(settings.http)
        if tls is not None:  # each client's handshake is done in a thread of its own
            listener = tls.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        self._server.socket = listener
        host = f"[{settings.serve.host}]" if ":" in settings.serve.host else settings.serve.host
        self.url = f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="sgviz-stub", daemon=True
        )
        self._thread.start()

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body for a path."""
        if path.partition("?")[0] in HEALTH_PATHS:
            if self.why_not is None:
                return HTTPStatus.OK, {"status": "ready", "node": self._node}
            message = f"{self._node} is not ready: {self.why_not}"
            return HTTPStatus.SERVICE_UNAVAILABLE, _error(message, "ServiceUnavailableError", 503)
        message = (
            f"{self._node} only runs schedulers and answers nothing but {' and '.join(HEALTH_PATHS)}; "
            f"requests go to {self._front}"
        )
        return HTTPStatus.NOT_FOUND, _error(message, "NotFoundError", 404)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_TIMEOUT_S  # a client that says nothing holds a thread that long

            def _reply(self) -> None:
                status, body = stub.answer(self.path)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Connection", "close")  # the body of a request is not read
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
                self.close_connection = True

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _reply

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _tls(http: HttpConfig) -> ssl.SSLContext | None:
    """As the server of node 0 has it."""
    if http.ssl_certfile is None:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(http.ssl_certfile, http.ssl_keyfile, http.ssl_keyfile_password or "")
    if http.ssl_ca_certs is not None:
        tls.load_verify_locations(http.ssl_ca_certs)
        tls.verify_mode = ssl.CERT_REQUIRED
    return tls


def _error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
