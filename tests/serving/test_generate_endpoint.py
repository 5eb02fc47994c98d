"""POST /generate: SGLang's native shape."""

from __future__ import annotations

from typing import Any

import pytest
from serving_tools import EOS, WORDS, Served
from test_chat_endpoint import events

ANSWER = "".join(WORDS)


def whole(server: Served, **fields: Any) -> Any:
    response = server.http.post("/generate", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_single(server: Served) -> None:
    out = whole(server, text="hi", rid="me")
    assert out == {
        "text": ANSWER,
        "output_ids": [500, 501, 502, 503, 504, EOS],
        "meta_info": {
            "id": "me",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "cached_tokens": 3,
        },
    }


def test_batch_with_lists(server: Served) -> None:
    out = whole(
        server,
        input_ids=[[97], [98]],
        rid=["a", "b"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "temperature": None}],
        return_logprob=[True, False],
        top_logprobs_num=[2, 0],
    )
    assert [one["text"] for one in out] == [" alpha", " alpha beta"]
    obj = server.manager.requests[-1]
    assert obj.rid == ["a", "b"] and obj.return_logprob == [True, False] and obj.top_logprobs_num == [2, 0]


def test_samples_come_as_a_list(server: Served) -> None:
    assert len(whole(server, text="hi", sampling_params={"n": 2})) == 2
    assert len(whole(server, text=["hi"])) == 1


def test_stream_is_cumulative(server: Served) -> None:
    out = events(
        server.http.post(
            "/generate", json={"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 2}}
        )
    )
    assert [event["text"] for event in out[:-1]] == [" alpha", " alpha beta"]
    assert [event["meta_info"]["finish_reason"] for event in out[:-1]] == [
        None,
        {"type": "length", "length": 2},
    ]
    assert out[-1] == "[DONE]"


def test_streamed_batch_has_indices(server: Served) -> None:
    out = events(server.http.post("/generate", json={"text": ["a", "b"], "stream": True}))
    assert {event["index"] for event in out[:-1]} == {0, 1}


def test_defaults_and_fields(server: Served) -> None:
    whole(
        server,
        text="hi",
        extra_key="k",
        log_metrics=False,  # of no effect
        logprob_start_len=-1,
        return_logprob=True,
        image_data=None,
    )
    obj = server.manager.requests[-1]
    assert (server.params.max_new_tokens, obj.default_new_tokens, obj.extra_key) == (None, 128, "k")
    whole(server, text="hi", sampling_params={"top_k": 10**30, "sampling_seed": 3, "stop": ["q"]})
    params = server.params
    assert (params.top_k, params.sampling_seed, params.stop) == (1 << 30, 3, ("q",))


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_methods(server: Served, method: str) -> None:
    assert server.http.request(method, "/generate", json={"text": "hi"}).status_code == 200
