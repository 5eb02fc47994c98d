"""The paths of a router: which methods each takes, and who answers. Imports: errors."""

from __future__ import annotations

from enum import Enum

from starlette.exceptions import HTTPException

from sgviz.errors import NotFound, SgvizError


class Who(Enum):
    """Who answers what was asked."""

    PAIR = "a prefill and a decode server"
    ROUTER = "the router"
    ONE = "one decode server"
    ALL = "each server"


GET, POST = ("GET", "HEAD"), ("POST",)
PATHS: dict[str, tuple[Who, tuple[str, ...]]] = {
    "/generate": (Who.PAIR, ("POST", "PUT")),
    "/v1/completions": (Who.PAIR, POST),
    "/v1/chat/completions": (Who.PAIR, POST),
    "/health": (Who.ROUTER, GET),
    "/ready": (Who.ROUTER, GET),
    "/ping": (Who.ROUTER, GET),
    "/health_generate": (Who.ROUTER, GET),
    "/server_info": (Who.ROUTER, GET),
    "/get_server_info": (Who.ROUTER, GET),
    "/metrics": (Who.ROUTER, GET),
    "/v1/models": (Who.ONE, GET),
    "/v1/models/{model_id:path}": (Who.ONE, GET),
    "/model_info": (Who.ONE, GET),
    "/get_model_info": (Who.ONE, GET),
    "/weight_version": (Who.ONE, GET),
    "/get_weight_version": (Who.ONE, GET),
    "/tokenize": (Who.ONE, POST),
    "/v1/tokenize": (Who.ONE, POST),
    "/detokenize": (Who.ONE, POST),
    "/v1/detokenize": (Who.ONE, POST),
    "/parse_function_call": (Who.ONE, POST),
    "/separate_reasoning": (Who.ONE, POST),
    "/v1/embeddings": (Who.ONE, POST),  # a server of a pair makes no vectors, and says so
    "/encode": (Who.ONE, ("POST", "PUT")),
    "/v1/score": (Who.ONE, POST),
    "/v1/rerank": (Who.ONE, ("POST", "PUT")),
    "/abort_request": (Who.ALL, POST),
    "/flush_cache": (Who.ALL, ("GET", "POST")),
    "/v1/loads": (Who.ALL, GET),
    "/get_load": (Who.ALL, GET),
}


def refusal(method: str, path: str) -> SgvizError | HTTPException:
    """Why a request that no path of the table takes has no answer: its method, or that it concerns one server."""
    if path in PATHS:
        return HTTPException(405, headers={"Allow": ", ".join(PATHS[path][1])})
    return NotFound(
        f"the router does not pass on {method} {path}: what concerns one server alone, ask that server "
        "(GET /server_info names them)"
    )
