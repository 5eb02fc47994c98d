"""One decode step and one prefill, engine against engine, for machines that do other things too.

    python benchmarks/decode_step.py [--peer transformers] [--peer llama-cpp --gguf FILE] [--threads 1]

No pipeline around: the worker's decode graph and forward, transformers' forward with its dynamic cache, llama.cpp's
`llama_decode`. The engines take turns at every single step, and the least CPU time of a step is what the engine needs
when the others leave it alone (with one thread; with more the wall's time is taken). `offline.py` measures whole runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offline import corpus, cut, find_gguf
from peers import LlamaCppRunner, PeerMissing, Prompts, load_transformers

from sgviz.batch.forward_mode import ForwardMode
from sgviz.config import DEFAULT_MODEL
from sgviz.model.attention import TorchAttention
from sgviz.model.decode_graph import DecodeGraph
from sgviz.model.fetch import resolve_model
from sgviz.model.forward_batch import ForwardBatch
from sgviz.model.kv_pool import MHATokenToKVPool
from sgviz.model.loader import load_model
from sgviz.model.model_config import Quantization

Step = Callable[[], object]


class OwnEngine:
    """The model, its pool and its decode graph."""

    def __init__(self, folder: Path, quantization: Quantization | None, slots: int) -> None:
        self.name = f"sgviz {quantization or 'float32'}"
        self._model = load_model(folder, "float32", quantization=quantization)
        facts = self._model.config.facts
        self._pool = MHATokenToKVPool(
            num_layers=facts.num_layers,
            size=slots,
            page_size=1,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        self._attention, self._graph = TorchAttention(self._pool), DecodeGraph(self._model, self._pool)

    def prefill(self, prompts: Prompts) -> Step:
        batch = self._batch(prompts, 0)
        return lambda: self._model.forward(batch, self._attention)

    def decode(self, prompts: Prompts) -> Step:
        """The last token of each prompt as a step."""
        self.prefill(prompts)()
        batch, rows = self._batch(prompts, len(prompts[0]) - 1), torch.arange(len(prompts))

        def step() -> object:
            inputs = self._graph.prepare(batch, rows)
            assert inputs is not None
            return self._graph.run(batch.input_ids.clone(), inputs)

        return step

    def _batch(self, prompts: Prompts, done: int) -> ForwardBatch:
        count, length = len(prompts), len(prompts[0])
        slots = np.random.default_rng(0).permutation(self._pool.size)[: count * length] + 1
        table = slots.reshape(count, length)
        return ForwardBatch.build(
            ForwardMode.DECODE if done else ForwardMode.EXTEND,
            input_ids=[token for ids in prompts for token in ids[done:]],
            prefix_lens=[done] * count,
            extend_lens=[length - done] * count,
            out_cache_loc=table[:, done:].reshape(-1),
            slot_table=table,
        )


class TransformersEngine:
    name = "transformers"

    def __init__(self, folder: Path, threads: int) -> None:
        self._model, _ = load_transformers(folder, threads)

    def prefill(self, prompts: Prompts) -> Step:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        return lambda: self._model(ids, logits_to_keep=1)

    def decode(self, prompts: Prompts) -> Step:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        cache = self._model(ids[:, :-1], logits_to_keep=1).past_key_values

        def step() -> object:
            out = self._model(ids[:, -1:], past_key_values=cache).logits[:, -1].argmax(-1)
            cache.crop(-1)
            return out

        return step


class LlamaEngine(LlamaCppRunner):
    def prefill(self, prompts: Prompts) -> Step:
        return lambda: self.generate(prompts, 1)

    def decode(self, prompts: Prompts) -> Step:
        last = len(prompts[0]) - 1
        self.generate([ids[:-1] for ids in prompts], 1)

        def step() -> object:
            memory = self._lib.llama_get_memory(self._context)
            for sequence in range(len(prompts)):
                self._lib.llama_memory_seq_rm(memory, sequence, last, -1)
            self._decode([(ids[-1], last, sequence, True) for sequence, ids in enumerate(prompts)])
            return [self._argmax(i) for i in range(len(prompts))]

        return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peer", action="append", default=[], choices=("transformers", "llama-cpp"))
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    text, slots = corpus(folder), max([*args.prefill, *(rows * args.context for rows in args.rows)])
    with torch.inference_mode():
        engines: list[Any] = [OwnEngine(folder, None, slots), OwnEngine(folder, "w8a8_int8", slots)]
        engines += peers(args, folder)
        for rows in args.rows:
            prompts = cut(text, rows, args.context)
            compare(
                f"decode, {rows} rows at {args.context}", [e.decode(prompts) for e in engines], engines, args
            )
        for length in args.prefill:
            prompts = cut(text, 1, length)
            compare(f"prefill of {length}", [e.prefill(prompts) for e in engines], engines, args)


def peers(args: argparse.Namespace, folder: Path) -> list[Any]:
    found: list[Any] = []
    for peer in args.peer:
        try:
            if peer == "transformers":
                found.append(TransformersEngine(folder, args.threads))
            else:
                found.append(LlamaEngine(args.gguf or find_gguf(), args.threads, repack=False))
        except PeerMissing as missing:
            print(f"left out: {missing}")
    return found


def compare(what: str, steps: list[Step], engines: list[Any], args: argparse.Namespace) -> None:
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(args.steps + 2):
        for place, step in enumerate(steps):
            start = clock()
            step()
            if turn >= 2:
                times[place].append(1000 * (clock() - start))
    kind = "CPU ms, one thread" if args.threads == 1 else f"wall ms, {args.threads} threads"
    print(f"{what} ({kind}): least, median", flush=True)
    for engine, values in zip(engines, times, strict=True):
        print(f"  {engine.name:20} {min(values):8.1f} {statistics.median(values):8.1f}", flush=True)


if __name__ == "__main__":
    main()
