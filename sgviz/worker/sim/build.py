"""From settings to a SimWorker: shape and memory of the simulated model, vocabulary of the real tokenizer.

Imports: config, model (facts and tokenizer, no torch), worker.
"""

from __future__ import annotations

from sgviz.config import DEFAULT_MAX_RUNNING, Settings
from sgviz.errors import ConfigError
from sgviz.messages.embedding import EmbeddingSpec
from sgviz.model.fetch import resolve_model
from sgviz.model.model_config import model_facts
from sgviz.model.tokenizer import Tokenizer
from sgviz.worker.kv_budget import kv_tokens, usable_context
from sgviz.worker.protocol import WorkerInfo
from sgviz.worker.sim.cost_model import CostModel, RooflineCost
from sgviz.worker.sim.device_timer import DeviceTimer
from sgviz.worker.sim.fitted_cost import FittedCost
from sgviz.worker.sim.hardware import GB, Gpu, find_gpu
from sgviz.worker.sim.models import SimModel, find_model
from sgviz.worker.sim.text_ids import text_ids
from sgviz.worker.sim.token_rule import TokenRule
from sgviz.worker.sim.worker import SimWorker

MOST_KV_TOKENS = 1 << 20  # slot numbers are kept on the host, so a pool of a tiny model must not be endless


def make_sim_worker(
    settings: Settings, *, timer: DeviceTimer | None = None, cost: CostModel | None = None
) -> SimWorker:
    """The simulated device that the settings describe.

    Args:
        timer: another clock than the wall's. cost: another cost model than the settings'.

    Raises:
        ConfigError: the model does not fit the GPU, or its heads cannot be divided among so many.
        StartupError: the model path has no tokenizer.
    """
    model = find_model(settings.sim.sim_model)
    roofline = RooflineCost(find_gpu(settings.model.device), model, settings.sim.sim_tp)
    folder = resolve_model(settings.model.model_path)
    own = settings.model.tokenizer_path
    tokenizer = Tokenizer.load(resolve_model(own) if own else folder)
    facts = model_facts(folder)
    info = _info(settings, roofline, facts.vocab_size, facts.eos_token_ids)
    ids = [i for i in text_ids(tokenizer) if i < info.vocab_size and i not in info.eos_token_ids]
    eos = info.eos_token_ids[0] if info.eos_token_ids else None
    chosen = cost or (FittedCost.load(settings.sim.sim_cost) if settings.sim.sim_cost else roofline)
    rule = TokenRule(ids, eos, settings.model.random_seed)
    return SimWorker(info, chosen, rule, timer, link_bandwidth=roofline.gpu.link_bandwidth)


def _info(settings: Settings, cost: RooflineCost, vocab: int, eos: tuple[int, ...]) -> WorkerInfo:
    """What the scheduler is told: memory and context of the simulated model, ids of the tokenizer's."""
    gpu, model, tp = cost.gpu, cost.model, cost.tp
    context = usable_context(settings.model.context_length, model.context_len)
    weights = model.weight_bytes // tp
    token_bytes = -(-model.kv_bytes_per_token // min(tp, model.kv_heads))
    budget = int(gpu.memory_bytes * settings.cache.mem_fraction_static) - weights
    _check_fits(gpu, model, tp, weights, budget)
    rows = settings.schedule.max_running_requests or DEFAULT_MAX_RUNNING
    return WorkerInfo(
        model=model.name,
        vocab_size=vocab,
        context_len=context,
        max_total_num_tokens=kv_tokens(
            max_total_tokens=settings.cache.max_total_tokens,
            page_size=settings.cache.page_size,
            token_bytes=token_bytes,
            budget_bytes=budget,
            useful_tokens=min(rows * context, MOST_KV_TOKENS),
        ),
        eos_token_ids=eos,
        device=settings.model.device,
        dtype="bfloat16" if model.itemsize == 2 else "float8",
        num_layers=model.layers,
        bytes_per_token=token_bytes,
        weight_bytes=weights,
        simulated=True,
        embedding=EmbeddingSpec(
            dim=model.hidden, pooling="mean" if settings.model.pooling == "mean" else "last"
        ),
        is_generation=not settings.model.is_embedding,
    )


def _check_fits(gpu: Gpu, model: SimModel, tp: int, weights: int, budget: int) -> None:
    if budget > 0:
        return
    raise ConfigError(
        f"{model.name} has {weights / GB:.0f} GB of weights a GPU on {tp} of {gpu.name}, which leaves no KV memory "
        f"of {gpu.memory_bytes / GB:.0f} GB; take more GPUs (sim_tp), a larger one, or a smaller sim_model",
        param="sim_model",
    )
