"""A process that holds one environment of one session: the far end of `makespan.envs.isolation.InProcess`.

It reads calls from standard input and writes what came of them to what was its standard output, each as a length (four
bytes, big-endian) and a MessagePack message. Whatever the environment prints goes to the log. It ends when its input
does, and with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import sys
from typing import Any, BinaryIO, cast

import msgspec

from makespan.envs.protocol import said_by
from makespan.envs.registry import resolve
from makespan.rollout.environment import Action, Environment, Observation, StepResult, SyncEnvironment, TaskRefused
from makespan.rollout.trajectory import Task

LENGTH_BYTES = 4
_PR_SET_PDEATHSIG = 1


class Make(msgspec.Struct, frozen=True, tag_field="call", tag="make"):
    """Make the environment; with at most `memory_bytes` of data, if that is given."""

    factory: str
    memory_bytes: int | None = None


class Reset(msgspec.Struct, frozen=True, tag_field="call", tag="reset"):
    task: Task


class Step(msgspec.Struct, frozen=True, tag_field="call", tag="step"):
    action: Action


class Close(msgspec.Struct, frozen=True, tag_field="call", tag="close"):
    pass


Call = Make | Reset | Step | Close


class Answer(msgspec.Struct, frozen=True):
    """What came of a call: a value, the reason of a refusal, or the error that was raised."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: str | None = None
    raised: str | None = None


def die_with_parent() -> None:
    """Be killed when the parent is, even in the middle of a call (Linux; elsewhere the end of the input must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit(1)  # it died before


def bound_memory(memory_bytes: int) -> None:
    """Let allocations beyond `memory_bytes` of data fail with `MemoryError`."""
    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    resource.setrlimit(kind, (memory_bytes, memory_bytes))


class Child:
    """Runs calls one after the other."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._environment: Environment | SyncEnvironment | None = None

    def handle(self, call: Call) -> Answer:
        """Run one call; whatever it raises becomes its answer."""
        try:
            return Answer(value=msgspec.Raw(msgspec.msgpack.encode(self._run(call))))
        except TaskRefused as error:
            return Answer(refused=said_by(error))
        except BaseException as error:  # SystemExit, KeyboardInterrupt, a panic: here they are the environment's own
            return Answer(raised=f"{type(error).__name__}: {said_by(error)}")

    def _run(self, call: Call) -> Observation | StepResult | None:
        if isinstance(call, Make):
            if call.memory_bytes is not None:
                bound_memory(call.memory_bytes)
            self._environment = resolve(call.factory)()
            return None
        assert self._environment is not None, "the first call makes the environment"
        match call:
            case Reset():
                return cast(Observation, self._finish(self._environment.reset(call.task)))
            case Step():
                return cast(StepResult, self._finish(self._environment.step(call.action)))
            case Close():
                self._finish(self._environment.close())
                return None

    def _finish(self, result: Any) -> Any:
        return self._runner.run(result) if inspect.iscoroutine(result) else result


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "big")) if len(head) == LENGTH_BYTES else None


def write_message(stream: BinaryIO, body: bytes) -> None:
    stream.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    stream.flush()


def main() -> None:
    """The process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the server's to handle
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
    with asyncio.Runner() as runner:
        child = Child(runner)
        while (body := read_message(sys.stdin.buffer)) is not None:
            write_message(answers, msgspec.msgpack.encode(child.handle(decoder.decode(body))))


if __name__ == "__main__":
    main()
