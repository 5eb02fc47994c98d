"""What a router is told when it starts. Imports: errors."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from sgviz.errors import ConfigError

POLICIES = ("random", "round_robin", "least_requests", "power_of_two")
LAST_PORT = 65_535
DEFAULT_PORTS = MappingProxyType({"http": 80, "https": 443})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Times in seconds.

    Attributes:
        prefill: addresses and, where they are not asked for it, bootstrap ports. decode: addresses.
        retries: other pairs that a request tries before its first token, after the first pair.
        request_timeout: until a stream begins, or another answer is there; None: for ever.
        health_interval: between two looks at a server. health_timeout: that such a look may take.
        record: a .sgv file for the router's events. seed: of rooms and of the policy `random`.
        api_key: sent with the router's own questions.
    """

    prefill: tuple[tuple[str, int | None], ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "round_robin"
    retries: int = 2
    request_timeout: float | None = None
    health_interval: float = 2.0
    health_timeout: float = 5.0
    max_body_mb: float = 64.0
    record: str | None = None
    seed: int | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that is not allowed."""
        for side, count in (("prefill", len(self.prefill)), ("decode", len(self.decode))):
            if not count:
                raise ConfigError(f"--{side}: a router needs at least one {side} server", param=side)
        if self.policy not in POLICIES:
            raise ConfigError(
                f"--policy {self.policy!r}: it must be one of {', '.join(POLICIES)}", param="policy"
            )
        if self.retries < 0:
            raise ConfigError(f"--retries {self.retries}: it must be 0 or more", param="retries")
        for name in ("health_interval", "health_timeout", "request_timeout", "max_body_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {value}: it must be a number above 0", param=name)
        _check_addresses("prefill", [url for url, _ in self.prefill])
        _check_addresses("decode", list(self.decode))
        if shared := {url for url, _ in self.prefill} & set(self.decode):
            raise ConfigError(
                f"{shared.pop()} is given both as --prefill and --decode; a server is one of them"
            )

    def public(self) -> dict[str, str | int | float | bool | None]:
        """The options without secrets, for the head of a recording."""
        return {
            "router_prefill": " ".join(url for url, _ in self.prefill),
            "router_decode": " ".join(self.decode),
            "router_policy": self.policy,
            "router_retries": self.retries,
            "router_request_timeout": self.request_timeout,
        }


def address(text: str) -> str:
    """`http://host:port`, from what somebody typed: one server has one address. Raises ConfigError."""
    wrong = ConfigError(f"{text!r} is no address of a server; one is http://HOST:PORT")
    try:
        parts = urlsplit(text.rstrip("/").removesuffix("/v1"))
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise wrong from None
    more = parts.path or parts.query or parts.fragment or "@" in parts.netloc  # no names and passwords
    if parts.scheme not in DEFAULT_PORTS or not host or port == 0 or more or any(map(str.isspace, text)):
        raise wrong
    shown = f"[{host}]" if ":" in host else host
    at = "" if port in (None, DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{shown}{at}"


def prefill_of(words: list[str]) -> tuple[str, int | None]:
    """Address and bootstrap port from the one or two words behind --prefill. Raises ConfigError."""
    if len(words) > 2:
        raise ConfigError(
            f"--prefill {' '.join(words)}: it takes URL [BOOTSTRAP_PORT]; give --prefill again for more"
        )
    if len(words) == 1:
        return address(words[0]), None
    if not words[1].isdecimal() or not 1 <= int(words[1]) <= LAST_PORT:
        raise ConfigError(f"--prefill {words[0]} {words[1]}: {words[1]!r} is no port: 1 to {LAST_PORT}")
    return address(words[0]), int(words[1])


def _check_addresses(side: str, urls: list[str]) -> None:
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ConfigError(f"--{side} {twice} is given twice", param=side)
