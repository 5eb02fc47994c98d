"""What a grammar costs: throughput with a JSON schema over that without, on the same running engine.

    python benchmarks/grammar.py [--model smollm2-135m-instruct] [--running 8] [--tokens 96] [--pairs 9] [--json]

Requests of the same prompts and the same number of output tokens, all at once, greedy, components in processes, both
loops. The schema wants more than the tokens allow, so both sides stop at the limit. Each pair runs them once with the
schema and once without, in an order that alternates, so that drift falls on both. Printed: the median of the pairwise
ratios with its 95 % interval (bootstrap), and what compiling took, for the first grammar and for a further one.
Target: 0.8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from overhead import interval

from sgviz.engine import Engine
from sgviz.events import schema

TARGET = 0.8
LOOPS = ("normal", "overlap")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reader", "writer", "editor"]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "minLength": 3, "maxLength": 12},
            "maxItems": 4,
        },
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 400}  # longer than any run here


def run(engine: Engine, grammar: dict[str, Any], running: int, tokens: int) -> float:
    """Output tokens a second of `running` requests at once."""
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **grammar}
    prompts = [f"A list of {20 + i} people with names, ages and roles, as JSON:" for i in range(running)]
    start = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - start
    made = sum(output["meta_info"]["completion_tokens"] for output in outputs)
    if made != running * tokens:
        raise SystemExit(f"the sides differ: {made} tokens instead of {running * tokens}")
    return made / seconds


def measure(engine: Engine, running: int, tokens: int, pairs: int) -> dict[str, float]:
    """Interleaved pairs; the first is thrown away."""
    sides: tuple[dict[str, Any], ...] = ({"json_schema": PEOPLE}, {})
    seen: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs + 1):
        for grammar in sides if pair % 2 else sides[::-1]:
            speed = run(engine, grammar, running, tokens)
            if pair:
                seen[bool(grammar)].append(speed)
    ratios = [on / off for on, off in zip(seen[True], seen[False])]
    low, high = interval(ratios)
    return {
        "tok_s_on": statistics.median(seen[True]),
        "tok_s_off": statistics.median(seen[False]),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        **first_grammar(engine),
    }


def first_grammar(engine: Engine) -> dict[str, float]:
    """Milliseconds: compiling (the first one takes in the vocabulary), and a further schema on the warm backend."""
    engine.generate("x", {"json_schema": PERSON, "max_new_tokens": 1})
    compiled = [
        event.body.compile_ns / 1e6
        for event in engine.pipeline.ring.snapshot()
        if isinstance(event.body, schema.GrammarReady) and not event.body.hit and event.body.compile_ns
    ]
    return {"first_ms": compiled[0], "further_ms": compiled[-1]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    results = {}
    for loop in LOOPS:
        with Engine(args.model, mode="processes", event_loop=loop, log_level="warning") as engine:
            results[loop] = measure(engine, args.running, args.tokens, args.pairs)
    if args.json:
        print(json.dumps(results))
        return 0
    for loop, found in results.items():
        print(
            f"{loop}: grammar on/off {found['ratio']:.3f} [{found['ratio_low']:.3f}, {found['ratio_high']:.3f}] "
            f"(target {TARGET}), {found['tok_s_on']:.0f} against {found['tok_s_off']:.0f} tok/s at {args.running} "
            f"running; first grammar {found['first_ms']:.0f} ms with the vocabulary, a further schema "
            f"{found['further_ms']:.1f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
