"""What inference costs: a step of a replica as a linear function of what it does.

A replica works in steps. In a step every running sequence gets one token, and up to `chunk_tokens` of prompts are
prefilled beside it:

    step = step_s + sequence_s * sequences + context_s * context tokens + prefill_s * prefilled tokens

where the context is summed over the sequences that decode (each token of it is read once). Linear in each term is what
a roofline says of a decode that is bound by memory traffic and a prefill that is bound by arithmetic; the constants are
those of no particular machine until they are calibrated against one.

`k` alike steps in a row, with each of `n` decoding sequences growing by a token a step, take

    k * (first step) + context_s * n * k * (k - 1) / 2

so the time of many steps, and how many steps fit into a time, are computed at once instead of one by one.
"""

from __future__ import annotations

import math

import msgspec


class InferenceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of the linear cost, in seconds. The defaults are guesses for one GPU with an 8B to 30B model."""

    step_s: float = 0.010
    """Any step at all: weights read once, kernels launched."""
    sequence_s: float = 50e-6
    """One more running sequence: its activations and its recurrent state."""
    context_s: float = 27e-9
    """One more token of context: its keys and values read."""
    prefill_s: float = 50e-6
    """One prompt token computed."""
    chunk_tokens: int = 2048
    """Prompt tokens that one step prefills at most."""

    def times(self, factor: float) -> InferenceCost:
        """The cost of a machine that takes `factor` times as long for everything."""
        return msgspec.structs.replace(
            self,
            step_s=factor * self.step_s,
            sequence_s=factor * self.sequence_s,
            context_s=factor * self.context_s,
            prefill_s=factor * self.prefill_s,
        )

    def steps_s(
        self, steps: int, decoding: int, context_tokens: int, prefilling: int = 0, prefilled_tokens: int = 0
    ) -> float:
        """Seconds of `steps` steps that each give `decoding` sequences a token, and prefill `prefilled_tokens` of
        `prefilling` others; the decoding ones' contexts sum to `context_tokens` in the first step."""
        first_s = self._first_s(decoding, context_tokens, prefilling, prefilled_tokens)
        return steps * first_s + self.context_s * decoding * (steps * (steps - 1) / 2)

    def _first_s(self, decoding: int, context_tokens: int, prefilling: int, prefilled_tokens: int) -> float:
        sequences_s = self.sequence_s * (decoding + prefilling)
        return self.step_s + sequences_s + self.context_s * context_tokens + self.prefill_s * prefilled_tokens

    def steps_begun(
        self,
        elapsed_s: float,
        decoding: int,
        context_tokens: int,
        prefilling: int = 0,
        prefilled_tokens: int = 0,
    ) -> int:
        """How many of such steps have begun, the first at time 0, when `elapsed_s` have passed (at least one).

        The smallest `k` with `steps_s(k) >= elapsed_s`: that step's end is the next moment at which anything can
        change.
        """
        work = (decoding, context_tokens, prefilling, prefilled_tokens)
        quadratic = self.context_s * decoding / 2
        linear = self._first_s(*work) - quadratic
        if quadratic > 0:
            guess = (math.sqrt(linear * linear + 4 * quadratic * elapsed_s) - linear) / (2 * quadratic)
        else:
            guess = elapsed_s / linear
        steps = max(1, math.ceil(guess))
        while steps > 1 and self.steps_s(steps - 1, *work) >= elapsed_s:
            steps -= 1
        while self.steps_s(steps, *work) < elapsed_s:
            steps += 1
        return steps

    def alone_s(self, uncached_tokens: int, prompt_tokens: int, generated_tokens: int) -> float:
        """Seconds of one inference on an idle replica: no schedule serves it faster.

        The step that completes the prompt gives the first token, so `generated_tokens - 1` decode steps follow.
        """
        chunks = math.ceil(max(1, uncached_tokens) / self.chunk_tokens)
        prefill_s = chunks * (self.step_s + self.sequence_s) + self.prefill_s * uncached_tokens
        return prefill_s + self.steps_s(max(0, generated_tokens - 1), 1, prompt_tokens + 1)

    def work_s(self, uncached_tokens: int, prompt_tokens: int, generated_tokens: int) -> float:
        """The part of an inference's time that no batching can share with others: all but `step_s` of each step."""
        decode = msgspec.structs.replace(self, step_s=0.0).steps_s(max(0, generated_tokens - 1), 1, prompt_tokens + 1)
        return self.prefill_s * uncached_tokens + decode
