"""A port that tokenizer workers serve together, and the main process's app behind them.

The app listens on a Unix socket in the engine's private folder; only the workers talk to it.
Imports: launch, serving, observe.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI

from sgviz.config import HttpConfig, Settings
from sgviz.errors import ConfigError
from sgviz.launch.pipeline import Pipeline
from sgviz.launch.tokenizer_router import MultiTokenizerRouter
from sgviz.launch.tokenizer_workers import TokenizerWorkers
from sgviz.messages.workers import ConfigureLoggingReq, HttpNoted
from sgviz.serving.counting import Counts
from sgviz.serving.listeners import open_path, share_port
from sgviz.serving.pass_on import IDLE_S
from sgviz.serving.server import ServerHandle, check_tls

QUIET_S = 60 * IDLE_S
LEAVE_S = 3.0  # for the last bytes of all workers, and their ends


class WorkerFace:
    """The running workers and the app behind them; see `ServerHandle` for the public part."""

    def __init__(self, workers: TokenizerWorkers, behind: ServerHandle, url: str, port: int) -> None:
        self._workers, self._behind = workers, behind
        self.url = url
        self.port = port

    @classmethod
    async def start(cls, pipeline: Pipeline, app: FastAPI, host: str, port: int) -> WorkerFace:
        """Share the port, start the workers, return once all take requests.

        Raises:
            ConfigError: key and certificate cannot be used.
            StartupError: the address cannot be used, or a worker could not start. No process is left behind.
        """
        settings = pipeline.settings
        check_tls(settings.http)
        listeners = share_port(host, port, settings.serve.tokenizer_worker_num)
        try:
            port = listeners[0].getsockname()[1]
            path = pipeline.ports.main_path
            behind = await ServerHandle.start(app, http=_plain(settings.http), listener=open_path(path))
            try:
                workers = await pipeline.start_workers(listeners, path)
            except BaseException:
                await behind.stop(0.0)
                raise
        finally:
            for listener in listeners:
                listener.close()  # the workers have their own by now, or nobody shall
        scheme = "https" if settings.http.ssl_certfile else "http"
        name = f"[{host}]" if ":" in host else host
        return cls(workers, behind, f"{scheme}://{name}:{port}", port)

    async def stop(self, grace: float = LEAVE_S) -> None:
        """Close the port of an engine that stops: let the workers end, then the app behind them."""
        await self._workers.leave(max(grace, LEAVE_S))
        await self._behind.stop(0.0)


class AllLogs:
    """The switch of the request log in the main process and in all workers."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def configure(
        self, on: bool | None = None, level: int | None = None, form: str | None = None
    ) -> dict[str, bool | int | str]:
        """As `RequestLog.configure`."""
        if self._pipeline.router is not None:
            self._pipeline.router.tell(ConfigureLoggingReq(on=on, level=level, form=form))
        return self._pipeline.request_log.configure(on, level, form)


def count_of_workers(router: MultiTokenizerRouter | None, counts: Counts) -> None:
    """From now on what workers tell of their HTTP requests is counted, too."""
    if router is None:
        return

    def count(noted: HttpNoted) -> None:
        if noted.status:
            counts.left(noted.endpoint, noted.method, noted.status)
        else:
            counts.came(noted.endpoint, noted.method)

    router.on_http = count


def check_no_workers(settings: Settings) -> None:
    """Raise ConfigError if an engine that nobody serves is to have tokenizer workers."""
    count = settings.serve.tokenizer_worker_num
    if count > 1:
        raise ConfigError(
            f"setting tokenizer_worker_num = {count}: tokenizer workers stand behind the port of `sgviz serve` only; "
            "an Engine answers from its own process, so leave it at 1",
            param="tokenizer_worker_num",
        )


def _plain(http: HttpConfig) -> HttpConfig:
    """Behind the workers nothing is encrypted, and it is they who close what is quiet.

    If this end closed it, a request could be under way on it, and would fail for no reason.
    """
    return msgspec.structs.replace(
        http,
        ssl_keyfile=None,
        ssl_certfile=None,
        ssl_ca_certs=None,
        ssl_keyfile_password=None,
        timeout_keep_alive=max(http.timeout_keep_alive, QUIET_S),
    )
