"""`makespan plan`: how a replica's memory divides, which settings to give vLLM, and how many trajectories fit."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from makespan.commands.output import check_output, write_json
from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.importers import FORMATS, load
from makespan.rollout.resources import calibration
from makespan.rollout.resources.budget import GIB
from makespan.rollout.resources.candidates import settings_of, small_plays
from makespan.rollout.resources.footprint import DTYPE_BYTES, CacheSettings, ModelFootprint, footprint
from makespan.rollout.resources.plan import MemoryPlan, PlanRequest, base_settings, carried, make_plan
from makespan.rollout.resources.profile import WorkloadProfile, from_numbers, from_trace, unspecified
from makespan.rollout.resources.shape import UnknownArchitecture
from makespan.rollout.resources.vllm_wire import Answer, Play, Question, VllmUnavailable, ask

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}

ASK_S = 13.0
"""How long vLLM is waited for: it takes 7 to 10 s on two CPU cores, and the whole answer should take less than 20 s."""

JUDGE_S = 1.0
"""How long vLLM's scheduler may take for one candidate."""


def add_plan(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("model", help="embedded, smollm2, a model's directory or its config.json")
    command.add_argument("--memory", required=True, help="of one device: 141GiB, 80GB, ...")
    command.add_argument(
        "--training-resident", default="0", metavar="SIZE", help="what a trainer keeps on it meanwhile"
    )
    command.add_argument("--tp", type=int, default=1, help="devices that share a replica (default: 1)")
    command.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", help="where vLLM will run")
    workload = command.add_argument_group("workload")
    workload.add_argument("--workload", type=Path, metavar="TRACE", help="a trace, or a run's directory or event log")
    workload.add_argument("--format", help=f"of the trace: {', '.join(FORMATS)} (default: guessed)")
    workload.add_argument("--prompt", type=int, help="without a trace: tokens of the first prompt (default: 2000)")
    workload.add_argument("--turns", type=int, help="turns a trajectory (default: 20)")
    workload.add_argument("--generated", type=int, help="tokens generated a turn (default: 200)")
    workload.add_argument("--observation", type=int, help="tokens of an observation (default: 500)")
    workload.add_argument("--environment-s", type=float, help="seconds of an action (default: 2)")
    settings = command.add_argument_group("settings that are to be kept (default: chosen here)")
    settings.add_argument("--mamba-cache-mode", choices=("none", "align", "all"), help="default: align")
    settings.add_argument("--no-prefix-caching", action="store_true", help="the same as --mamba-cache-mode none")
    settings.add_argument("--block-size", type=int, help="tokens")
    for name in ("kv-cache-dtype", "mamba-cache-dtype", "mamba-ssm-cache-dtype"):
        settings.add_argument(f"--{name}", default="auto", choices=tuple(DTYPE_BYTES), help="default: auto")
    settings.add_argument("--prefix-match-unit", type=int, help="tokens")
    settings.add_argument("--retain-all", action="store_true", help="prefix_cache_retention_interval=None")
    settings.add_argument("--max-model-len", type=int, help="default: the model's context")
    settings.add_argument("--max-num-batched-tokens", type=int, default=8192, help="default: 8192")
    known = command.add_argument_group("what is known better than estimated")
    known.add_argument("--weights", metavar="SIZE", help="on one device (quantised weights: say it here)")
    known.add_argument("--activations", metavar="SIZE", help="working space on one device, as vLLM reports it")
    known.add_argument("--calibration", type=Path, metavar="PATH", help="costs of inference, from makespan calibrate")
    command.add_argument("--closed-form", action="store_true", help="do not ask vLLM")


def run_plan(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code. Raises `MakespanError`."""
    check_output("--json", options.json)
    model = model_path(options.model)
    settings = cache_settings(options)
    request = PlanRequest(
        memory_bytes=size("--memory", options.memory),
        training_resident_bytes=size("--training-resident", options.training_resident),
        weights_bytes=None if options.weights is None else size("--weights", options.weights),
        activations_bytes=None if options.activations is None else size("--activations", options.activations),
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        cost=None if options.calibration is None else calibration.read(options.calibration).cost,
    )
    profile = workload_profile(options)
    found, answer, notes = inquire(options, model, settings, request, profile)
    plan = make_plan(found, request, profile, played=answer.played if answer else (), notes=notes)
    write_json(options.json, figures(plan))
    show(console, plan)
    return 0


def inquire(
    options: argparse.Namespace, model: Path, settings: CacheSettings, request: PlanRequest, profile: WorkloadProfile
) -> tuple[ModelFootprint, Answer | None, list[str]]:
    """The footprint, from vLLM where it answers, and what it said of the candidates.

    Raises `ResourceError` where neither vLLM nor the closed form knows the model, or it does not fit."""
    closed: ModelFootprint | None = None
    unknown: UnknownArchitecture | None = None
    plays: list[Play] = []
    try:
        closed = footprint(model, tensor_parallel=options.tp, platform=options.platform, settings=settings)
    except UnknownArchitecture as error:
        unknown = error
    else:
        profile = profile.within(request.length(closed))  # refused before vLLM is asked for nothing
        need = carried(closed, request, profile).blocks_a_trajectory
        choices = settings_of(closed)
        if len(choices) > 1:
            plays = small_plays(closed, choices, profile.trajectories, need, request.inference_cost(), JUDGE_S)
    if options.closed_form:
        if closed is None:
            assert unknown is not None
            raise unknown
        return closed, None, ["closed form; vLLM was not asked"]
    question = Question(
        model=str(model),
        tensor_parallel=options.tp,
        platform=options.platform,
        settings=(settings,),
        max_model_len=request.length(closed) if closed else options.max_model_len,
        max_num_batched_tokens=request.max_num_batched_tokens,
        plays=tuple(plays),
    )
    try:
        answer = ask(question, ASK_S if closed else 60.0)
    except VllmUnavailable as error:
        if closed is None:
            raise UnknownArchitecture(f"{unknown}; {error}") from error
        return closed, None, [f"closed form, as {error}"]
    (told,) = answer.footprints
    notes = ["block sizes, groups and weights are vLLM's own"]
    if closed is not None:
        told = msgspec.structs.replace(told, family=closed.family, max_context_tokens=closed.max_context_tokens)
        if (told.block_tokens, told.bytes_per_block) != (closed.block_tokens, closed.bytes_per_block):
            notes.append(
                f"the closed form has blocks of {closed.block_tokens} tokens, {closed.bytes_per_block:,} bytes; "
                "vLLM's count"
            )
    return told, answer, notes


def model_path(name: str) -> Path:
    """A bundled model's directory, or a path. Raises `ConfigError`."""
    path = Path(name)
    if path.exists():
        return path
    from makespan.integrations.models import resolve

    return resolve(name)


def cache_settings(options: argparse.Namespace) -> CacheSettings:
    """The settings that the command line asks for. Raises `ConfigError` for those that contradict each other."""
    mode = options.mamba_cache_mode
    if options.no_prefix_caching:
        if mode not in (None, "none"):
            raise ConfigError(f"--no-prefix-caching and --mamba-cache-mode {mode} contradict each other")
        mode = "none"
    if options.retain_all and options.prefix_match_unit is not None:
        raise ConfigError(
            "--retain-all and --prefix-match-unit contradict each other: one keeps whole blocks, one parts"
        )
    for name in ("block_size", "prefix_match_unit", "max_model_len", "max_num_batched_tokens", "tp"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    return base_settings(
        mode or "align",
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        mamba_cache_dtype=options.mamba_cache_dtype,
        mamba_ssm_cache_dtype=options.mamba_ssm_cache_dtype,
        retain_all=options.retain_all,
        match_unit=options.prefix_match_unit,
    )


def workload_profile(options: argparse.Namespace) -> WorkloadProfile:
    """The workload: a trace, the numbers, or a default. Raises `MakespanError`."""
    numbers = {
        "prompt_tokens": options.prompt,
        "turns": options.turns,
        "generated_tokens": options.generated,
        "observation_tokens": options.observation,
        "environment_s": options.environment_s,
    }
    given = {name: value for name, value in numbers.items() if value is not None}
    if options.workload is None:
        return from_numbers(**given) if given else unspecified()
    if given:
        raise ConfigError(f"--workload and {', '.join(given)} contradict each other: the trace says them")
    return from_trace(load(options.workload, options.format), options.workload.name)


def size(option: str, text: str) -> int:
    """Bytes of `141GiB`, `80GB` or a number. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{option}: {text!r} is no size; write for example 141GiB or 80GB")
    return int(float(match[1]) * unit)


def figures(plan: MemoryPlan) -> dict[str, object]:
    """The plan for programs: its main figures by their own names, then everything."""
    found = plan.footprint
    names = (
        "state_bytes_per_sequence",
        "kv_bytes_per_token",
        "block_tokens",
        "page_bytes",
        "bytes_per_block",
        "attention_groups",
        "recurrent_groups",
        "prefix_caching",
    )
    return {
        **{name: getattr(found, name) for name in names},
        "num_blocks": plan.num_blocks,
        "reference_concurrency": plan.reference_concurrency,
        "vllm_args": plan.vllm_arguments(),
        "verl_overrides": plan.verl_overrides(),
        "plan": msgspec.to_builtins(plan),
    }


def show(console: Console, plan: MemoryPlan) -> None:
    """The plan for people."""
    found, memory = plan.footprint, plan.memory
    console.print(
        f"{found.family} ({found.architecture}) on {found.platform}, {found.tensor_parallel} rank(s); "
        f"workload: {plan.workload_source}",
        soft_wrap=True,
    )
    console.print(_memory_table(plan))
    columns = ("trajectories at once", "found of prompts", "of findable", "recomputed a turn", "tokens/s")
    table = Table(*columns, title="one replica")
    for one in plan.predictions:
        mark = " (reference)" if one.concurrency == plan.reference_concurrency else ""
        table.add_row(
            f"{one.concurrency:,}{mark}",
            f"{one.cached_share:.0%}",
            f"{one.found_share:.0%}",
            f"{one.recomputed_tokens_per_turn:,.0f} tokens",
            f"{one.generated_tokens_per_s:,.0f}",
        )
    console.print(table)
    if len(plan.candidates) > 1:
        judged = Table("setting", "computes", "vLLM's scheduler", title="candidates (prompt tokens computed)")
        for candidate in plan.candidates:
            told = candidate.scheduler_computed_tokens
            name = candidate.name + (" (chosen)" if candidate.chosen else "")
            judged.add_row(name, f"{candidate.computed_tokens:,}", "not asked" if told is None else f"{told:,}")
        console.print(judged)
    for trap in plan.warnings:
        console.print(f"warning: {trap.what}. Remedy: {trap.remedy}.", soft_wrap=True, style="yellow")
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if not plan.calibrated:
        console.print("note: tokens/s by guessed costs; measure them with `makespan calibrate`", soft_wrap=True)
    if memory.training_resident_bytes and found.platform == "cuda":
        console.print("note: gpu_memory_utilization leaves room for what training keeps resident", soft_wrap=True)
    console.print(f"vllm serve MODEL {_flags(plan)}", soft_wrap=True, highlight=False)
    console.print(f"verl: {' '.join(map(shlex.quote, plan.verl_overrides()))}", soft_wrap=True, highlight=False)


def _memory_table(plan: MemoryPlan) -> Table:
    found, memory = plan.footprint, plan.memory
    table = Table(show_header=False)
    if memory.training_resident_bytes:
        table.add_row("training, resident", _gib(memory.training_resident_bytes))
    table.add_row("weights", _gib(memory.weights_bytes))
    table.add_row("activations and runtime (estimate)", _gib(memory.activations_bytes))
    table.add_row("states, keys and values", f"{_gib(memory.cache_bytes)} in {plan.num_blocks:,} blocks")
    table.add_row("reserve", _gib(memory.reserved_bytes))
    table.add_row("state a sequence", f"{found.state_bytes_per_sequence:,} bytes")
    table.add_row("keys and values a token", f"{found.kv_bytes_per_token:,} bytes")
    table.add_row("block", f"{found.block_tokens:,} tokens, {found.bytes_per_block:,} bytes")
    groups = f"{found.attention_groups} of attention, {found.recurrent_groups} of recurrent layers"
    table.add_row("groups", groups)
    table.add_row("reference concurrency", f"{plan.reference_concurrency:,} trajectories a replica")
    table.add_row("max_num_seqs", f"{plan.max_num_seqs:,}")
    return table


def _flags(plan: MemoryPlan) -> str:
    flags = []
    for name, value in plan.vllm_arguments().items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(option if value else f"--no-{option[2:]}")
        else:
            flags.append(f"{option} {value}")
    return " ".join(flags)


def _gib(bytes_: int) -> str:
    return f"{bytes_ / GIB:,.2f} GiB"
