"""Log-probabilities of a simulated device: by the rule of its tokens, the same however a prompt is cut."""

from __future__ import annotations

import pytest

from sgviz.engine import Engine

IDS = [11, 40, 41, 42, 300, 301, 17, 80, 81, 82]
ASKED = {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2}


@pytest.mark.parametrize("chunk", [-1, 4])
def test_prompts_have_them_too(chunk: int) -> None:
    params = {"max_new_tokens": 3, "sampling_seed": 5, "ignore_eos": True}
    with Engine(
        "tiny-llama", device="sim:h200", sim_model="qwen2.5-0.5b", chunked_prefill_size=chunk
    ) as engine:
        first, again = (engine.generate(input_ids=IDS, sampling_params=params, **ASKED) for _ in range(2))
        chosen = [entry[0][1] for entry in first["meta_info"]["input_top_logprobs"][1:]]
        beside = engine.generate(
            input_ids=IDS, sampling_params=params, **{**ASKED, "token_ids_logprob": [chosen[0], chosen[1]]}
        )
    meta = first["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == IDS[3:]
    assert meta["input_token_logprobs"] == again["meta_info"]["input_token_logprobs"]
    assert meta["input_token_logprobs"][0][0] is None and len(meta["output_token_logprobs"]) == 3
    assert all(-1 <= value <= 0 for value, _, _ in meta["input_token_logprobs"][1:])
    assert chosen == IDS[4:]  # the token that came is the likeliest
    first_row = beside["meta_info"]["input_token_ids_logprobs"][1]
    assert first_row[0][0] == meta["input_token_logprobs"][1][0] and first_row[1][0] < first_row[0][0]
