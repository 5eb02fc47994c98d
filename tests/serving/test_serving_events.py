"""What serving emits: one received and one converted event, a sent event for each chunk, one end per rid."""

from __future__ import annotations

from typing import Any

import pytest
from serving_tools import WORDS, Served, chat, text, until

from sgviz.events.schema import ChunkSent, RequestConverted, RequestReceived, RequestRefused


def bodies(server: Served, rid: str) -> list[Any]:
    return [e.body for e in server.sink.snapshot() if getattr(e.body, "rid", None) == rid]


def test_streamed_chat(server: Served) -> None:
    request = chat(rid="ev-1", stream=True, stream_options={"include_usage": True}, max_tokens=2, stop="q")
    server.http.post("/v1/chat/completions", json=request)
    received, converted, *sent = bodies(server, "ev-1")
    assert isinstance(received, RequestReceived) and isinstance(converted, RequestConverted)
    assert (received.type, received.path) == ("ChatCompletionRequest", "/v1/chat/completions")
    assert (received.stream, received.messages, received.chars) == (True, 1, 2)
    prompt = len("user:hi\nassistant:")
    assert (converted.prompt_kind, converted.size, converted.max_new_tokens) == ("input_ids", prompt, 2)
    assert converted.stop == ("q",)
    assert [(body.part, body.chars) for body in sent if isinstance(body, ChunkSent)] == [
        ("role", 0), ("delta", 6), ("delta", 5), ("finish", 0), ("usage", 0), ("done", 0),
    ]  # fmt: skip
    assert until(lambda: ("ev-1", 200) in server.manager.sent)
    assert server.manager.sent.count(("ev-1", 200)) == 1


def test_received_ns_is_stamped_before_the_event(server: Served) -> None:
    server.http.post("/v1/completions", json=text(rid="ev-2"))
    first = next(e for e in server.sink.snapshot() if getattr(e.body, "rid", None) == "ev-2")
    assert 0 < server.manager.requests[-1].received_ns <= first.t


@pytest.mark.parametrize("streamed", [False, True])
def test_every_rid_ends_once(server: Served, streamed: bool) -> None:
    server.http.post("/v1/completions", json=text(rid="p", prompt=["a", "b"], stream=streamed))
    assert sorted(server.ends(2)) == [("p_0", 200), ("p_1", 200)]
    before = server.sink.total
    server.http.post("/generate", json={"text": ["a", "b"], "rid": ["x", "y"], "stream": streamed})
    received = [e.body for e in server.sink.snapshot()[before:] if e.kind == "request.received"]
    assert [body.rid for body in received if isinstance(body, RequestReceived)] == ["x", "y"]
    server.http.post("/v1/completions", json=text(rid="bad", temperature=-1, stream=streamed))
    server.http.post("/v1/completions", json=text(rid="lost", model="other", stream=streamed))
    ends = server.ends(8)
    assert ("bad", 400) in ends and ("lost", 404) in ends and ("x", 200) in ends
    assert len(ends) == 8 == len(dict(ends))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "prompts", "sizes"),
    [
        ("/v1/completions", {"prompt": ["a", "bcd"]}, [("text", 1), ("text", 3)]),
        ("/v1/completions", {"prompt": [[65], [66, 67]]}, [("input_ids", 1), ("input_ids", 2)]),
        ("/generate", {"text": ["a", "bcd"]}, [("text", 1), ("text", 3)]),
        ("/generate", {"input_ids": [[65], [66, 67]]}, [("input_ids", 1), ("input_ids", 2)]),
    ],
)
def test_every_prompt_of_a_list_is_a_request_of_its_own(
    server: Served, path: str, prompts: dict[str, Any], sizes: list[tuple[str, int]], streamed: bool
) -> None:
    before = server.sink.total
    assert server.http.post(path, json={**prompts, "rid": "R", "stream": streamed}).status_code == 200
    seen = [event.body for event in server.sink.snapshot()[before:]]
    assert {body.rid for body in seen} == {"R_0", "R_1"}
    received = [body for body in seen if isinstance(body, RequestReceived)]
    converted = [body for body in seen if isinstance(body, RequestConverted)]
    assert [body.rid for body in received] == [body.rid for body in converted] == ["R_0", "R_1"]
    assert [(body.prompt_kind, body.size) for body in converted] == sizes
    assert [body.chars for body in received] == [size if kind == "text" else 0 for kind, size in sizes]
    assert sorted(server.ends(2)) == [("R_0", 200), ("R_1", 200)]


def test_whole_answer_and_error_parts(server: Served) -> None:
    server.http.post("/v1/chat/completions", json=chat(rid="ev-3"))
    assert [(b.part, b.chars) for b in bodies(server, "ev-3")[2:]] == [("body", len("".join(WORDS)))]
    server.http.post("/v1/chat/completions", json=chat(rid="ev-4", model="other"))
    refused, sent = bodies(server, "ev-4")[1:]
    assert isinstance(refused, RequestRefused) and (refused.where, refused.status) == ("serving", 404)
    assert "'other'" in refused.why and sent.part == "error"


def test_nothing_is_emitted_when_off(server: Served) -> None:
    server.context.trace.on = False
    server.http.post("/v1/chat/completions", json=chat(rid="quiet", stream=True))
    assert server.ends(1) == [("quiet", 200)] and bodies(server, "quiet") == []
