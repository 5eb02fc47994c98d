"""/configure_logging: what is given changes, the rest stays, and the answer says how it is then."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving_tools import Served, error_of, served

from sgviz.serving import Keys
from sgviz.tokenizer_manager import RequestLog

PATH = "/configure_logging"


def configure(server: Served, body: Any, **headers: str) -> httpx.Response:
    return server.http.post(PATH, json=body, headers=headers)


def test_each_field_changes_alone() -> None:
    log = RequestLog()
    with served(request_log=log) as server:
        assert configure(server, {}).json() == {
            "log_requests": False, "log_requests_level": 2, "log_requests_format": "text"
        }  # fmt: skip
        configure(server, {"log_requests": True})
        configure(server, {"log_requests_level": 3})
        told = configure(server, {"log_requests_format": "json"}).json()
        assert told == {"log_requests": True, "log_requests_level": 3, "log_requests_format": "json"}
        assert (log.on, log.level, log.form) == (True, 3, "json")


@pytest.mark.parametrize(
    "body",
    [
        {"log_requests_level": 4},
        {"log_requests_level": "2"},
        {"log_requests": 1},
        {"log_requests_format": "xml"},
    ],
)
def test_what_is_not_allowed_changes_nothing(body: dict[str, Any]) -> None:
    log = RequestLog()
    with served(request_log=log) as server:
        answer = configure(server, {"log_requests": True, **body})
        assert answer.status_code == 400 and error_of(answer)["param"] in body
        assert (log.on, log.level, log.form) == (False, 2, "text")


def test_it_takes_the_admin_key_where_there_is_one() -> None:
    with served(request_log=RequestLog(), keys=Keys(api_key="k", admin_api_key="root")) as server:
        assert configure(server, {}, authorization="Bearer k").status_code == 401
        assert configure(server, {}, authorization="Bearer root").status_code == 200
