"""Where the time of one sequence went in the engine. Plain Python; the clock's values are arguments.

    times = SequenceTimes(arrival=now)
    times.begin(now)                            # its first step begins: what was before is time in the queue
    times.end_step(now, text_at, num_tokens=1)  # a step has given it a token, which was turned into text by `text_at`

Each call accounts for the time since the call before it, so the parts always add up to the time from `arrival` to `until`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SequenceTimes:
    """Seconds, on the clock of `time.monotonic`, which is the same in all processes of a machine.

    arrival:      when the engine got the request
    until:        time up to which everything is accounted for; in the last output, the end of the sequence
    queue:        waiting for the first step
    prompt:       from the beginning of the first step to the first token
    decode:       from the first token to the last one
    masks:        in its steps, computing which tokens structured outputs allow, for all sequences of the step
    detokenise:   turning its tokens into text
    num_steps:    steps that gave it tokens
    longest_step: the longest time from one of these steps to the next
    """

    arrival: float
    until: float = 0.0
    queue: float = 0.0
    prompt: float = 0.0
    decode: float = 0.0
    masks: float = 0.0
    detokenise: float = 0.0
    num_steps: int = 0
    longest_step: float = 0.0
    begun: bool = False

    def __post_init__(self) -> None:
        self.until = max(self.until, self.arrival)

    def begin(self, now: float) -> None:
        """A step of the sequence is about to be launched. Only the first one ends its time in the queue."""
        if not self.begun:
            self.begun = True
            self.queue += now - self.until
            self.until = now

    def end_step(self, now: float, text_at: float, num_tokens: int, mask_seconds: float = 0.0) -> None:
        """A step has given so many tokens, which became text from `now` to `text_at`; or the sequence ends without a token."""
        elapsed = now - self.until
        computing = elapsed
        if mask_seconds:
            masks = min(mask_seconds, elapsed)
            self.masks += masks
            computing -= masks
        if self.num_steps:
            self.decode += computing
            if elapsed > self.longest_step:
                self.longest_step = elapsed
        elif self.begun:
            self.prompt += computing
        else:
            self.queue += computing
        if num_tokens:
            self.num_steps += 1
        self.detokenise += text_at - now
        self.until = text_at
