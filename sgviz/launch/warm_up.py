"""The request that a started pipeline answers before anybody else's. Mirrors SGLang's `_wait_and_warmup`.

Imports: tokenizer_manager, messages, launch (loop_thread, kv_parts).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from sgviz.errors import SgvizError, StartupError
from sgviz.launch.kv_parts import without_other_side
from sgviz.launch.loop_thread import LoopThread
from sgviz.messages import EmbeddingReqInput, GenerateReqInput, SamplingParams
from sgviz.tokenizer_manager import TokenizerManager, raise_failure

WARMUP_TOKENS = 4
WARMUP_TIMEOUT_S = 120.0


def warm_up(
    manager: TokenizerManager, loop: LoopThread, name: str, after: Callable[[], Awaitable[None]]
) -> None:
    """One tiny generation (or vector) a rank, so that the first client does not pay for lazy set-up, then `after`.

    Args:
        name: tells the request of this engine from those of others.

    Raises:
        StartupError: it failed, or took too long.
    """
    limits = manager.limits
    prompt = [0, 1, 2, 3][: limits.max_req_input_len]
    most = min(WARMUP_TOKENS, limits.most_new_tokens(len(prompt))) if limits.is_generation else 0
    kind = GenerateReqInput if limits.is_generation else EmbeddingReqInput

    def request(rank: int) -> GenerateReqInput:
        made = kind(
            input_ids=prompt,
            rid=f"WARMUP_{os.getpid()}_{name}" + (f"_{rank}" if limits.dp_size > 1 else ""),
            sampling_params=SamplingParams(max_new_tokens=most, temperature=0.0, ignore_eos=True),
            routed_dp_rank=rank,
        )
        return made if limits.disaggregation_mode == "null" else without_other_side(made, rank)

    async def run_one(rank: int) -> None:
        async for output in manager.generate_request(request(rank)):
            raise_failure(output)

    async def run() -> None:
        await asyncio.gather(*[run_one(rank) for rank in range(limits.dp_size)])
        await manager.flush_cache()
        await after()

    try:
        loop.call(run(), timeout=WARMUP_TIMEOUT_S)
    except SgvizError as error:
        raise StartupError(f"the warm-up request failed: {error}") from None
    except TimeoutError:
        raise StartupError(f"the warm-up request took longer than {WARMUP_TIMEOUT_S:.0f} s") from None
