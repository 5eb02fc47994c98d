"""`request_timeout` on a whole engine: waiting and running requests end with 503, and the books stay right."""

from __future__ import annotations

import httpx
import pytest

from sgviz.engine import Engine
from sgviz.errors import Unavailable

ENDLESS = {"max_new_tokens": 1500, "ignore_eos": True}
WORDS = "took longer than 0.4 s \\(request_timeout\\)"


@pytest.mark.parametrize("event_loop", ["normal", "overlap"])
def test_running_and_waiting_requests_end_and_nothing_is_left(event_loop: str) -> None:
    with Engine(
        "tiny-llama",
        device="mock",
        mock_step_ms=3.0,
        max_running_requests=2,
        request_timeout=0.4,
        event_loop=event_loop,  # type: ignore[arg-type]
    ) as engine:
        for ids in ([[7] * 5] * 5, [3] * 9):
            with pytest.raises(Unavailable, match=WORDS):
                engine.generate(input_ids=ids, sampling_params=ENDLESS)
        with pytest.raises(Unavailable, match=WORDS):
            for _ in engine.stream_sync("x", ENDLESS):
                pass
        assert engine.generate("x", {"max_new_tokens": 3})["meta_info"]["completion_tokens"] == 3
        state = engine.internal_state()
        assert (state["num_live_reqs"], state["num_tokenizer_manager_reqs"]) == (0, 0)
        assert state["protected_tokens"] == state["private_tokens"] == 0
        rec = engine.recording()
        assert rec.audit().balanced and not rec.check()
        ends = rec.requests.set_index("rid")["finish_reason"].value_counts()
        assert ends["abort"] == 7 and ends["length"] == 1


def test_over_http_whole_and_streamed() -> None:
    with Engine("tiny-llama", device="mock", mock_step_ms=3.0, request_timeout=0.4) as engine:
        url = engine.serve(port=0).url
        body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 1500, "ignore_eos": True}
        whole = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert whole.status_code == 503 and whole.json()["error"]["type"] == "ServiceUnavailableError"
        streamed = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=30)
        assert streamed.status_code == 200 and "[DONE]" not in streamed.text
        assert '"code":503' in streamed.text.strip().splitlines()[-1]
