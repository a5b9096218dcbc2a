"""The `makespan` command: reads the command line and hands over to a subcommand.

Errors that a user can act on (`MakespanError`) become one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from makespan import __version__
from makespan.commands.ablate import add_ablate, run_ablate
from makespan.commands.calibrate import add_calibrate, run_calibrate
from makespan.commands.explain import add_explain, run_explain
from makespan.commands.plan import add_plan, run_plan
from makespan.commands.replay import add_replay, run_replay
from makespan.commands.report import add_report, run_report
from makespan.commands.simulate import add_simulate, run_simulate
from makespan.rollout.errors import MakespanError

BAD_INPUT = 2


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    root = argparse.ArgumentParser(prog="makespan", description="Rollouts of LLM agents that end sooner.")
    root.add_argument("--version", action="version", version=f"makespan {__version__}")
    commands = root.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run a batch of trajectories from a configuration file")
    run.add_argument("config", type=Path, help="a YAML file, for example examples/bfcl.yaml")
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a setting: tasks=8")
    run.add_argument("--model", help="embedded, smollm2 or a model's directory (the same as --set model.path=…)")
    run.add_argument("--record", type=Path, metavar="PATH", help="write the batch as a trace with ids (.gz: zipped)")
    _add_json(run)

    doctor = commands.add_parser("doctor", help="what is installed, what works, and what to do about what does not")
    doctor.add_argument("--generate", action="store_true", help="also start a replica and generate (about 30 s)")
    _add_json(doctor)

    simulate = commands.add_parser("simulate", help="run a batch in virtual time, through the policies that run live")
    add_simulate(simulate)
    _add_json(simulate)
    replay = commands.add_parser("replay", help="run a recorded batch again on real replicas and environment slots")
    add_replay(replay)
    _add_json(replay)
    ablate = commands.add_parser("ablate", help="compare policies on the same batches")
    add_ablate(ablate)
    _add_json(ablate)

    explained = commands.add_parser("explain", help="why the actions of a trajectory got their slots when they did")
    add_explain(explained)
    _add_json(explained)

    report = commands.add_parser("report", help="write the HTML report of a run, or of several side by side")
    add_report(report)

    plan = commands.add_parser("plan", help="what a replica's memory holds, and how to set vLLM for a workload")
    add_plan(plan)
    _add_json(plan)
    add_calibrate(commands.add_parser("calibrate", help="measure what prefill and decode cost on a real engine"))

    env = commands.add_parser("env", help="environment servers").add_subparsers(dest="env_command", required=True)
    serve = env.add_parser("serve", help="serve environments over ZeroMQ")
    serve.add_argument("config", type=Path, help="a YAML file with slots and environments, see docs/environments.md")
    worker = env.add_parser("worker", help="host environments for a server that runs elsewhere")
    worker.add_argument("config", type=Path, help="a YAML file with broker and environments, see docs/environments.md")
    status = env.add_parser("status", help="slots, queues, sessions and workers of a running server")
    status.add_argument("address", help="for example tcp://127.0.0.1:5757")
    status.add_argument("--timeout-s", type=float, default=5.0, help="how long to wait for an answer (default: 5)")
    _add_json(status)

    model = commands.add_parser("model", help="build or convert a bundled model and print its directory")
    model.add_argument("name", help="embedded or smollm2")
    return root


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="PATH", help="also write the figures as JSON; - is standard output")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        return _dispatch(options)
    except MakespanError as error:
        sys.stderr.write(f"makespan: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130


def _dispatch(options: argparse.Namespace) -> int:
    # People read standard output, unless a program does: then they read standard error.
    console = Console(stderr=getattr(options, "json", None) == "-")
    if options.command == "run":
        from makespan.commands.run import run
        from makespan.rollout.config import load

        overrides = list(options.set)
        if options.model is not None:
            overrides.append(f"model.path={json.dumps(options.model)}")  # a name such as 123 or on stays a name
        return run(load(options.config, overrides), console, options.json, options.record)
    if options.command == "doctor":
        from makespan.commands.doctor import doctor

        return doctor(console, options.json, options.generate)
    if options.command == "simulate":
        return run_simulate(options, console)
    if options.command == "replay":
        return run_replay(options, console)
    if options.command == "ablate":
        return run_ablate(options, console)
    if options.command == "explain":
        return run_explain(options, console)
    if options.command == "report":
        return run_report(options, console)
    if options.command == "plan":
        return run_plan(options, console)
    if options.command == "calibrate":
        return run_calibrate(options, console)
    if options.command == "env":
        from makespan.commands.env import serve, status, worker

        if options.env_command == "serve":
            return serve(options.config)
        if options.env_command == "worker":
            return worker(options.config)
        return status(console, options.address, options.timeout_s, options.json)
    from makespan.integrations.models import resolve

    sys.stdout.write(f"{resolve(options.name)}\n")
    return 0
