"""The options that `simulate` and `replay` share: who decides. The same words mean the same policies in both."""

from __future__ import annotations

import argparse

from makespan.rollout.admission import POLICIES as ADMISSION
from makespan.rollout.order import ORDERS
from makespan.rollout.routing import ROUTERS
from makespan.rollout.scheduling import POLICIES
from makespan.rollout.simulation.batch import Policies


def add_policies(command: argparse.ArgumentParser) -> None:
    """Add the options; the defaults are the baselines."""
    command.add_argument("--admission", default="everything", help=f"{', '.join(ADMISSION)} (default: everything)")
    command.add_argument("--concurrency", type=int, help="trajectories at once, for `fixed` (for `coupled`: the slots)")
    command.add_argument("--routing", default="sticky-least-inflight", help=", ".join(ROUTERS))
    command.add_argument("--scheduling", default="fifo", help=f"{', '.join(POLICIES)} (default: fifo)")
    command.add_argument("--order", default="arrival", help=f"who starts next: {', '.join(ORDERS)} (default: arrival)")


def policies_of(options: argparse.Namespace) -> Policies:
    """What the options say."""
    return Policies(
        admission=options.admission,
        concurrency=options.concurrency,
        routing=options.routing,
        scheduling=options.scheduling,
        order=options.order,
    )
