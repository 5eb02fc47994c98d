"""From what the caller asked to one checked, tokenized request a prompt.

Mirrors SGLang's normalisation of GenerateReqInput, `_tokenize_one_request` and `_validate_one_request`.
What is simplified: text and ids only, and nothing is truncated. Every refusal is a BadRequest before
anything was sent. Imports: messages, errors, events.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import msgspec

from sgviz.errors import BadRequest, NeverFits
from sgviz.events.time_stats import TimeStats
from sgviz.messages import GenerateReqInput, SamplingParams, TokenizedGenerateReqInput
from sgviz.messages.generate import LONG_TEXT, MAX_TOKEN_CHARS, new_rid, prompt_rids
from sgviz.messages.rids import check_rid, check_unicode
from sgviz.messages.sampling import TOP_K_ALL
from sgviz.tokenizer_manager.asked_logprobs import check_processor, spread_token_ids, start_of, token_ids_of
from sgviz.tokenizer_manager.bootstrap import rank_to_run, spread_meeting
from sgviz.tokenizer_manager.codec import TextCodec
from sgviz.tokenizer_manager.session_desk import check_turn, leading_id
from sgviz.tokenizer_manager.state import Limits
from sgviz.tokenizer_manager.tasks import check_task, of_kind

INT64_MAX = 2**63 - 1
MAX_ANSWERS = 16_384  # of one call: prompts times n
T = TypeVar("T")


class Preparer:
    """Splits, checks and tokenizes. Holds no state of any request."""

    def __init__(self, codec: TextCodec, limits: Limits) -> None:
        self._codec = codec
        self._limits = limits

    def split(self, obj: GenerateReqInput) -> list[GenerateReqInput]:
        """One request a prompt, each with its own rid and verified, normalised sampling parameters.

        Raises:
            BadRequest: wrong shape, a value that is not allowed, or one rid given twice.
        """
        check_task(obj, self._limits)
        prompts = _prompts(obj)
        size = None if obj.is_single else len(prompts)
        rids = _rids(obj.rid, size)
        params = [self._settle(p) for p in _spread(obj.sampling_params, size, "sampling_params")]
        answers = len(prompts) * params[0].n
        if answers > MAX_ANSWERS:
            raise BadRequest(
                f"{len(prompts)} prompts with n = {params[0].n} ask for {answers} answers; one call may ask for "
                f"at most {MAX_ANSWERS}",
                param="n" if params[0].n > 1 else None,
            )
        if len({p.n for p in params}) > 1:
            raise BadRequest(f"n must be the same for all prompts, got {[p.n for p in params]}", param="n")
        tops = _spread(obj.top_logprobs_num, size, "top_logprobs_num")
        logprobs = _spread(obj.return_logprob, size, "return_logprob")
        starts = _spread(obj.logprob_start_len, size, "logprob_start_len")
        token_ids = spread_token_ids(obj.token_ids_logprob, size, self._limits.vocab_size)
        for top in tops:
            _check_range("top_logprobs_num", top, 0, self._limits.vocab_size)
        turns = _spread(obj.session_params, size, "session_params")
        for turn, param in zip(turns, params):
            check_turn(turn, param)
        _check_priority(obj.priority)
        check_processor(obj.custom_logit_processor, self._limits.logit_processors)
        check_unicode("extra_key", obj.extra_key or "")
        mode, by_room = self._limits.disaggregation_mode, self._limits.by_room
        routed_dp_rank = rank_to_run(obj, self._limits.dp_size, mode)
        meetings = spread_meeting(obj, size, params[0].n, mode, by_room=by_room)
        return [
            msgspec.structs.replace(
                obj,
                text=prompt if isinstance(prompt, str) else None,
                input_ids=None if isinstance(prompt, str) else prompt,
                rid=rid,
                sampling_params=param,
                return_logprob=logprob,
                top_logprobs_num=top if logprob else 0,
                logprob_start_len=start if logprob else -1,
                token_ids_logprob=ids if logprob else None,
                session_params=turn,
                extra_key=obj.extra_key or None,
                routed_dp_rank=routed_dp_rank,
                **meeting,
            )
            for prompt, rid, param, logprob, top, start, ids, turn, meeting in zip(
                prompts, rids, params, logprobs, tops, starts, token_ids, turns, meetings
            )
        ]

    async def tokenize(
        self, one: GenerateReqInput, stats: TimeStats, counted: Callable[[int], None] | None = None
    ) -> TokenizedGenerateReqInput:
        """Ids, length checks and the output limit of one of `split`'s requests.

        Args:
            counted: told the number of tokens before they are checked.

        Raises:
            BadRequest: no tokens, or ids outside the vocabulary. NeverFits: too long.
        """
        ids, where = await self._ids(one)
        if counted is not None:
            counted(len(ids))
        self._check_ids(ids, where)
        params = _single(one.sampling_params)
        assert isinstance(one.rid, str)
        message = TokenizedGenerateReqInput(
            rid=one.rid,
            input_ids=ids,
            sampling_params=self._fit(params, len(ids), one.default_new_tokens),
            stream=one.stream,
            time_stats=stats,
            return_logprob=bool(one.return_logprob),
            top_logprobs_num=_single(one.top_logprobs_num),
            extra_key=one.extra_key,
            logprob_start_len=start_of(one, len(ids)),
            token_ids_logprob=token_ids_of(one),
            custom_logit_processor=one.custom_logit_processor,
            require_reasoning=None if one.require_reasoning is None else bool(one.require_reasoning),
            priority=one.priority,
            routed_dp_rank=one.routed_dp_rank,
        )
        if one.bootstrap_room is not None:
            host, port, room = one.bootstrap_host, one.bootstrap_port, one.bootstrap_room
            assert not (isinstance(host, list) or isinstance(port, list) or isinstance(room, list))
            message.bootstrap_host, message.bootstrap_port, message.bootstrap_room = host, port, room
            message.disagg_prefill_dp_rank = one.disagg_prefill_dp_rank
        if one.session_params is not None:
            message.session_params = _single(one.session_params)
            message.bos_token_id = leading_id(self._codec)
        return of_kind(message, one)

    def _settle(self, params: SamplingParams) -> SamplingParams:
        for text in params.stop_strings:
            check_unicode("stop", text)
        params.verify(self._limits.vocab_size)
        params = params.normalize()
        seed = params.sampling_seed
        if seed is not None:  # the copies of n > 1 count on from it
            _check_range("sampling_seed", seed, -INT64_MAX - 1, INT64_MAX - params.n)
        # larger values mean the same and might not fit into an int64 of the message
        interval = params.stream_interval
        return msgspec.structs.replace(
            params,
            top_k=min(params.top_k, TOP_K_ALL),
            stream_interval=None if interval is None else min(interval, self._limits.context_len),
        )

    async def _ids(self, one: GenerateReqInput) -> tuple[list[int], str]:
        """Unchecked, and the field they come from."""
        if isinstance(one.text, str):
            self._check_chars(one.text)
            if len(one.text) > LONG_TEXT:
                ids = await asyncio.to_thread(self._codec.encode, one.text)
            else:
                ids = self._codec.encode(one.text)
            return ids, "text"
        return _flat(one.input_ids), "input_ids"

    def _check_chars(self, text: str) -> None:
        """Refuse what is too long however it is cut, before the tokenizer works on it for half a minute."""
        most = self._limits.context_len * MAX_TOKEN_CHARS
        if len(text) > most:
            raise NeverFits(
                f"the prompt has {len(text)} characters; this model's maximum context length is "
                f"{self._limits.context_len} tokens, which is at most {most} characters",
                param="text",
            )

    def _check_ids(self, ids: list[int], where: str) -> None:
        vocab, length = self._limits.vocab_size, len(ids)
        if not ids:
            raise BadRequest("the prompt has no tokens; give at least one", param=where)
        if min(ids) < 0 or max(ids) >= vocab:
            bad = next(token for token in ids if not 0 <= token < vocab)
            raise BadRequest(f"token id {bad} is outside the vocabulary (0 to {vocab - 1})", param=where)
        longest = min(self._limits.context_len - 1, self._limits.max_req_input_len)
        if length > longest:
            raise NeverFits(
                f"the prompt has {length} tokens; this model's maximum context length is "
                f"{self._limits.context_len} tokens and a prompt may have at most {longest}",
                param=where,
            )

    def _fit(self, params: SamplingParams, length: int, default: int | None) -> SamplingParams:
        """The output limit against context and KV memory: None becomes `default`, or all that is left."""
        limits, left = self._limits, self._limits.most_new_tokens(length)
        if params.max_new_tokens is None:
            limit = left if default is None else min(left, default)
            params = msgspec.structs.replace(params, max_new_tokens=limit)
            params.verify(self._limits.vocab_size)
        elif params.max_new_tokens > left:
            raise NeverFits(
                f"the prompt has {length} tokens and up to {params.max_new_tokens} are asked for; this model's "
                f"maximum context length of {limits.context_len} tokens and a KV pool of "
                f"{limits.max_total_num_tokens} leave at most {left}",
                param="max_new_tokens",
            )
        return params


def _prompts(obj: GenerateReqInput) -> Sequence[str | list[int]]:
    if (obj.text is None) == (obj.input_ids is None):
        raise BadRequest("give exactly one of text and input_ids", param="text")
    if obj.text is not None:
        texts = [obj.text] if isinstance(obj.text, str) else obj.text
        for text in texts:
            check_unicode("text", text)
        return _not_empty(texts, "text")
    given = [obj.input_ids] if obj.is_single else cast("list[list[int]]", obj.input_ids)
    return _not_empty([_flat(ids) for ids in given], "input_ids")


def _not_empty(prompts: list[T], where: str) -> list[T]:
    if not prompts:
        raise BadRequest(f"{where} is an empty list; give at least one prompt", param=where)
    return prompts


def _rids(rid: str | list[str] | None, size: int | None) -> list[str]:
    """One rid a prompt: as given, or numbered after the one given for a batch, or fresh."""
    if rid is None:
        return [new_rid() for _ in range(size or 1)]
    if isinstance(rid, str) and size is not None:
        check_rid(rid)
        return prompt_rids(rid, size)
    rids = _spread(rid, size, "rid")
    for each in rids:
        check_rid(each)
    if len(set(rids)) < len(rids):
        twice = Counter(rids).most_common(1)[0][0]
        raise BadRequest(f"rid {twice!r} is given to more than one prompt", param="rid")
    return rids


def _spread(value: T | list[T], size: int | None, name: str) -> list[T]:
    """One value a prompt; `size` is None for a lone prompt, which takes no list."""
    if not isinstance(value, list):
        return [value] * (size or 1)
    if len(value) != size:
        prompts = "one prompt, not a list" if size is None else f"{size} prompts"
        raise BadRequest(f"{name} has {len(value)} entries for {prompts}", param=name)
    return value


def _single(value: T | list[T] | list[T | None]) -> T:
    assert not isinstance(value, list), "split gives one value a prompt"
    return value


def _flat(ids: list[int] | list[list[int]] | None) -> list[int]:
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        expected = "input_ids must be a list of integers, or a list of such lists"
        raise BadRequest(expected, param="input_ids")
    return cast("list[int]", ids)


def _check_priority(priority: object) -> None:
    if priority is not None:
        if type(priority) is not int:
            raise BadRequest(f"priority must be an integer, got {priority!r:.60}", param="priority")
        _check_range("priority", priority, -INT64_MAX - 1, INT64_MAX)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low} and {high}, got {value}", param=name)
