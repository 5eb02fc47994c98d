"""The endpoints that pause, continue, reload, profile and measure the engine. Each is a few lines.

Mirrors the control routes of SGLang's http_server, with its levels of access. Imports: errors, messages.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from sgviz.errors import BadRequest
from sgviz.serving.auth import AccessRules, AuthLevel
from sgviz.serving.control_protocol import (
    ContinueRequest,
    PauseRequest,
    ProfileRequest,
    SlowDownRequest,
    UpdateWeightsRequest,
    WeightVersionRequest,
    parse_control,
)
from sgviz.serving.http_errors import json_response, validate_json_request
from sgviz.serving.loads import new_shape, old_shape, prometheus_text, sections_of
from sgviz.serving.routes import Body, Context
from sgviz.serving.serving_base import refuse_unless_up

router = APIRouter()
ADMIN_PATHS = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/start_profile",
    "/stop_profile",
    "/slow_down",
)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def declare_levels(rules: AccessRules) -> None:
    """Who may change an engine: the admin, where there is one. Its load and its weights' name are for all."""
    for path in ADMIN_PATHS:
        rules.declare(path, AuthLevel.ADMIN_OPTIONAL)


async def optional_body(request: Request) -> dict[str, Any]:
    """As `validate_json_request`, and nothing at all is an empty object."""
    return await validate_json_request(request) if await request.body() else {}


OptionalBody = Annotated[dict[str, Any], Depends(optional_body)]


# ---------------------------------------------------------------- pauses


@router.post("/pause_generation")
async def pause_generation(body: OptionalBody, context: Context) -> Response:
    """Let no new request begin; abort, send back to the queue, or halt those under way."""
    refuse_unless_up(context.status)
    mode = parse_control(PauseRequest, body).mode
    held = await context.tokenizer_manager.control.pause_generation(mode)
    message = f"generation is paused (mode {mode})"
    return json_response({"status": "ok", "message": message, "num_paused_requests": held})


@router.post("/continue_generation")
async def continue_generation(body: OptionalBody, context: Context) -> Response:
    refuse_unless_up(context.status)
    parse_control(ContinueRequest, body)
    await context.tokenizer_manager.control.continue_generation()
    return json_response({"status": "ok", "message": "generation continues"})


# ---------------------------------------------------------------- weights


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(body: Body, context: Context) -> Response:
    """Run with other weights of the same model; the answer comes when it does, or why it does not."""
    refuse_unless_up(context.status)
    asked = parse_control(UpdateWeightsRequest, body)
    reply = await context.tokenizer_manager.control.update_weights_from_disk(
        asked.model_path,
        asked.load_format,
        flush_cache=asked.flush_cache,
        abort_all_requests=asked.abort_all_requests,
        weight_version=asked.weight_version,
    )
    return json_response(
        {"success": True, "message": reply.message, "num_paused_requests": len(reply.progress)}
    )


@router.post("/update_weight_version")
async def update_weight_version(body: Body, context: Context) -> Response:
    """Give the weights another name."""
    refuse_unless_up(context.status)
    asked = parse_control(WeightVersionRequest, body)
    control = context.tokenizer_manager.control
    await control.update_weight_version(asked.new_version, asked.abort_all_requests)
    message = f"the weights are called {asked.new_version!r} now"
    return json_response({"success": True, "message": message, "new_version": asked.new_version})


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(context: Context) -> Response:
    return json_response({"weight_version": context.tokenizer_manager.control.weights.version})


# ---------------------------------------------------------------- profiles and slowness


@router.post("/start_profile")
async def start_profile(body: OptionalBody, context: Context) -> Response:
    """Begin a profile of the scheduler's process; the answer says where its file will be."""
    refuse_unless_up(context.status)
    asked = parse_control(ProfileRequest, body)
    path = await context.tokenizer_manager.control.start_profile(
        asked.output_dir,
        asked.num_steps,
        asked.activities,
        with_stack=bool(asked.with_stack),
        record_shapes=bool(asked.record_shapes),
        profile_id=asked.profile_id,
    )
    return json_response({"success": True, "message": "profiling", "path": path})


@router.api_route("/stop_profile", methods=["GET", "POST"])
async def stop_profile(context: Context) -> Response:
    """End it and write the file."""
    refuse_unless_up(context.status)
    path = await context.tokenizer_manager.control.stop_profile()
    return json_response({"success": True, "message": "the profile is written", "path": path})


@router.api_route("/slow_down", methods=["POST", "PUT"])
async def slow_down(body: OptionalBody, context: Context) -> Response:
    """Put off each forward, to see what a slower device would do."""
    refuse_unless_up(context.status)
    asked = parse_control(SlowDownRequest, body)
    await context.tokenizer_manager.control.slow_down(asked.forward_sleep_time)
    return Response()


# ---------------------------------------------------------------- load


@router.get("/get_load")
async def get_load(context: Context) -> Response:
    refuse_unless_up(context.status)
    return json_response(old_shape(await context.tokenizer_manager.control.get_loads()))


@router.get("/v1/loads")
async def loads(
    context: Context,
    include: str | None = None,
    dp_rank: int | None = None,
    format: Literal["json", "prometheus"] = "json",
) -> Response:
    """The load of each rank that lives, or of the one asked for, by sections."""
    refuse_unless_up(context.status)
    sections = sections_of(include)
    loads = await context.tokenizer_manager.control.get_loads()
    if dp_rank is not None and dp_rank not in loads:
        there = ", ".join(map(str, loads))
        raise BadRequest(
            f"dp_rank must be one of the ranks that live ({there}), got {dp_rank}", param="dp_rank"
        )
    shapes = [
        new_shape(rank, load, time.time(), sections)
        for rank, load in loads.items()
        if dp_rank in (None, rank)
    ]
    if format == "prometheus":
        return PlainTextResponse(prometheus_text(shapes), media_type=PROMETHEUS)
    return json_response(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": context.facts.version,
            "accelerator": context.settings.get("device"),
            "num_accelerators": len(loads),
            "loads": shapes,
        }
    )
