"""What w8a8_int8 loses against float32: perplexity, top-1 agreement and divergence on a fixed text.

The text is the language reference that Python brings along (`pydoc_data.topics`), eight cuts of 512 tokens.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgviz.batch.forward_mode import ForwardMode
from sgviz.model.attention import TorchAttention
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.model.loader import load_model
from sgviz.model.model_config import Quantization
from sgviz.model.tokenizer import Tokenizer

CUTS, LENGTH = 8, 512


def measure_quality(folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    sequences = _sequences(folder)
    exact = _logprobs(folder, None, sequences)
    small = _logprobs(folder, "w8a8_int8", sequences)
    a, b = _perplexity(exact, sequences), _perplexity(small, sequences)
    agreement = torch.cat([(x.argmax(-1) == y.argmax(-1)).float() for x, y in zip(exact, small)]).mean()
    divergence = torch.cat([(x.exp() * (x - y)).sum(-1) for x, y in zip(exact, small)]).mean()
    print(
        f"{CUTS} x {LENGTH} tokens: perplexity float32 {a:.3f}, w8a8_int8 {b:.3f} ({100 * (b / a - 1):+.2f} %); "
        f"top-1 agreement {100 * float(agreement):.1f} %; KL divergence {float(divergence):.4f} nats; "
        f"activations of {8 if torch.cpu._is_vnni_supported() else 7} bits on this CPU"
    )


def _sequences(folder: Path) -> list[list[int]]:
    from pydoc_data.topics import topics

    ids = Tokenizer.load(folder).encode("\n\n".join(topics[key] for key in sorted(topics)))
    step = (len(ids) - LENGTH) // CUTS
    return [ids[i * step : i * step + LENGTH] for i in range(CUTS)]


def _logprobs(folder: Path, quantization: Quantization | None, sequences: list[list[int]]) -> list[Tensor]:
    """Log-probabilities at every position, [LENGTH, vocab] each."""
    model = load_model(folder, "float32", quantization=quantization)
    facts = model.config.facts
    pool = MHATokenToKVPool(
        num_layers=facts.num_layers,
        size=LENGTH,
        page_size=1,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    attention, table, outputs = TorchAttention(pool), np.arange(1, LENGTH + 1)[None], []
    for ids in sequences:
        batch = ForwardBatch.build(
            ForwardMode.EXTEND,
            input_ids=ids,
            prefix_lens=[0],
            extend_lens=[LENGTH],
            out_cache_loc=table[0],
            slot_table=table,
        )
        batch.logit_rows = torch.arange(LENGTH)
        outputs.append(model.forward(batch, attention).log_softmax(-1))
    return outputs


def _perplexity(logprobs: list[Tensor], sequences: list[list[int]]) -> float:
    losses = [
        -rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        for rows, ids in zip(logprobs, sequences, strict=True)
    ]
    return math.exp(float(torch.cat(losses).mean()))
