"""Penalties count the tokens that were sampled on another server."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sgviz.batch.forward_mode import ForwardMode
from sgviz.batch.req import Req
from sgviz.batch.schedule_batch import ScheduleBatch
from sgviz.cache.req_to_token_pool import ReqToTokenPool
from sgviz.messages import SamplingParams
from sgviz.worker.sampling_batch import SamplingBatch


@pytest.mark.parametrize("primed", [False, True])
def test_a_primed_member_begins_with_the_output_that_it_has(primed: bool) -> None:
    req = Req("r", [1, 2, 3], SamplingParams(frequency_penalty=0.5).normalize(), 8)
    req.output_ids, req.is_primed, req.kv.req_pool_idx = [7, 7], primed, 1
    batch = ScheduleBatch(ReqToTokenPool(2, 16), [req], forward_mode=ForwardMode.DECODE, seq_lens=[5])
    assert SamplingBatch.from_batch(batch).fresh == ([(0, [7, 7])] if primed else [])
