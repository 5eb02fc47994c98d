"""Engines that generate greedily for `offline.py`: sgviz and those it is compared with, all behind `Runner`.

Each takes the same token ids and gives a fixed number of tokens a prompt, whatever they are. A peer that is
not installed raises PeerMissing, and the benchmark says so and goes on.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]


class PeerMissing(Exception):
    """This peer cannot run here; the message says what is missing."""


class Runner(Protocol):
    """Something that generates."""

    name: str

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        """`tokens` greedy ids behind each prompt; ends of answers are ignored."""
        ...

    def close(self) -> None: ...


class SgvizRunner:
    """The whole pipeline: tokenizer manager, scheduler, detokenizer, and events; the prefix cache off."""

    def __init__(self, model: str, threads: int, **settings: Any) -> None:
        from sgviz.engine import Engine

        self.name = "sgviz " + (settings.get("quantization") or "float32")
        self._engine = Engine(
            model, torch_threads=threads, disable_radix_cache=True, watchdog_timeout=3600.0, **settings
        )

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=[list(ids) for ids in prompts], sampling_params=params)
        return [output["output_ids"] for output in outputs]

    def close(self) -> None:
        self._engine.close()


class TransformersRunner:
    """`generate` of one padded batch, float32.

    Args:
        cache: "dynamic" or "static", as transformers calls its KV caches.
    """

    def __init__(self, folder: Path, threads: int, cache: str = "dynamic") -> None:
        self.name = f"transformers {cache}"
        self._model, self._torch = load_transformers(folder, threads)
        self._cache = {"cache_implementation": "static"} if cache == "static" else {}

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        torch = self._torch
        ids = torch.tensor([list(prompt) for prompt in prompts])  # all of one length: nothing to pad
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
                **self._cache,
            )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    def close(self) -> None:
        del self._model
        gc.collect()


class ContinuousRunner:
    """transformers' continuous batching, `generate_batch`, float32."""

    name = "transformers continuous"

    def __init__(self, folder: Path, threads: int) -> None:
        self._model, _ = load_transformers(folder, threads, attn_implementation="sdpa")

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
        outputs = self._model.generate_batch(
            inputs=[list(prompt) for prompt in prompts], generation_config=config, progress_bar=False
        )
        if len(outputs) != len(prompts):
            raise PeerMissing(f"generate_batch gave {len(outputs)} of {len(prompts)} answers on this machine")
        return [list(output.generated_tokens) for output in outputs.values()]

    def close(self) -> None:
        del self._model
        gc.collect()


class LlamaCppRunner:
    """llama.cpp on a GGUF file; all sequences in one batch, greedy by argmax of its logits.

    Args:
        repack: let it repack weights for AMX and the like; its AMX kernels crash on machines that show AMX but
            do not permit it.
    """

    MAX_SEQUENCES = 32

    def __init__(self, gguf: Path, threads: int, repack: bool, context: int = 8192) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise PeerMissing("llama-cpp-python is not installed: pip install llama-cpp-python") from None
        self.name = f"llama.cpp {gguf.stem.rsplit('.', 1)[-1]}"
        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_silent(llama_cpp), ctypes.c_void_p(0))
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), options)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 2048, 512
        params.n_seq_max, params.kv_unified = self.MAX_SEQUENCES, True
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def generate(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        last = [self._prefill(sequence, ids) for sequence, ids in enumerate(prompts)]
        outputs = [[token] for token in last]
        for step in range(1, tokens):
            rows = [
                (token, len(ids) + step - 1, sequence, True)
                for sequence, (token, ids) in enumerate(zip(last, prompts, strict=True))
            ]
            self._decode(rows)
            last = [self._argmax(i) for i in range(len(rows))]
            for output, token in zip(outputs, last, strict=True):
                output.append(token)
        return outputs

    def _prefill(self, sequence: int, ids: Sequence[int]) -> int:
        self._decode([(token, i, sequence, i == len(ids) - 1) for i, token in enumerate(ids)])
        return self._argmax(len(ids) - 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, logits wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"llama_decode failed on {len(rows)} rows")

    def _argmax(self, row: int) -> int:
        import numpy as np

        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def load_transformers(folder: Path, threads: int, **options: Any) -> tuple[Any, Any]:
    """The model in float32, and torch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise PeerMissing("transformers is not installed: pip install transformers") from None
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    model.generation_config.eos_token_id = None
    return model, torch


def _silent(lib: Any) -> Any:
    """A log callback that drops everything; llama.cpp calls it as long as it is loaded."""
    return _SILENCE.setdefault("callback", lib.llama_log_callback(lambda level, text, user: None))


_SILENCE: dict[str, Any] = {}  # keeps the callback alive for the C library
