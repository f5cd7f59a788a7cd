"""From calls of step() to settings that all ranks use: the clock, the budget and the words of a search. Rank 0 only.

Each call ends a step, and the step before it is the sample of the setting that was proposed at the call before. A
proposal takes effect on all ranks in the round of agreement that decides it, which is the first of the next step, so no
step is half one setting and half another. Whose steps count is training/step_source.py's, anew for each search.

Where a script pauses between steps, to evaluate or to save, the sample is long and means nothing; medians and pairs
cope with some of those.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from ..training.step_source import Whose
from .search import STEPS_MAX, Budget, Verdict, budget, search
from .trials import Trials

OTHERS = (8 << 20, 32 << 20, 2 << 20, 512 << 10)  # beside the default; where samples are few the last are left out


def note(text: str) -> None:
    """One line for the user."""
    print(f"hvdlite: autotune: {text}", file=sys.stderr, flush=True)


def shown(fusion_bytes: int) -> str:
    """Of bytes: `8 MB`."""
    return f"{fusion_bytes / (1 << 20):g} MB"


class Tuner:
    """One search after the other, from the first step to a verdict. `propose` makes all ranks use a setting."""

    def __init__(
        self,
        default: int,
        limits: tuple[int, int, int],
        propose: Callable[[int], None],
        trials: Trials,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """limits: warm-up samples, steps per sample, samples at most."""
        self.budget: Budget = budget(*limits)
        if self.budget.cut:
            warmup, steps, samples = self.budget[:3]
            whole = f"{limits[0]} warm-up samples and {limits[2]} samples of {limits[1]} steps"
            cut = f"{warmup} and {samples} samples of {steps}"
            note(
                f"{whole} would be {(limits[0] + limits[2]) * limits[1]} steps; "
                f"to end within {STEPS_MAX} it takes {cut}"
            )
        self.settings = (default, *(other for other in OTHERS if other != default))
        self.propose, self.trials, self.clock = propose, trials, clock
        self.steps = 0  # calls that counted, over all searches
        self.verdict: Verdict | None = None
        self._source = Whose()
        self._in_force = default
        self.restart()

    @property
    def searching(self) -> bool:
        """Whether calls of step() still matter."""
        return self.verdict is None

    def restart(self) -> None:
        """A new search from the default on."""
        self.verdict = None
        self._search = search(self.settings, self.budget.samples)
        self._warmup = self.budget.warmup
        self._times: list[float] = []
        self._last: float | None = None
        self._source.forget()
        self._setting = self.settings[0] if self._warmup else next(self._search)

    def step(self, source: Any = None) -> None:
        """A step is over. source: the optimizer that made it; None: the script reports it itself."""
        if not self.searching or not self._counts(source):
            return
        now, last = self.clock(), self._last
        self._last = now
        self.steps += 1
        if last is None:
            self._use(self._setting)
            return
        self._times.append(max(1000 * (now - last), 1e-6))
        if len(self._times) == self.budget.steps:
            milliseconds, self._times = median(self._times), []
            self._sample(milliseconds)

    def _counts(self, source: Any) -> bool:
        counts = self._source.counts(source)
        if self._source.anew:
            self._last, self._times = None, []
        return counts

    def _use(self, setting: int) -> None:
        self._setting = setting
        if setting != self._in_force:
            self.propose(setting)
            self._in_force = setting

    def _sample(self, milliseconds: float) -> None:
        if self._warmup:
            self._warmup -= 1
            if not self._warmup:
                self._use(next(self._search))
            return
        self.trials.add(self._setting, self.steps, milliseconds)
        try:
            following = self._search.send(milliseconds)
        except StopIteration as end:
            self._finish(end.value)
            following = end.value.chosen
        self._use(following)

    def _finish(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.trials.add(verdict.chosen, self.steps, verdict.milliseconds, chosen=True)
        default, rival = self.settings[0], shown(verdict.rival)
        if verdict.chosen != default:
            text = f"{100 * verdict.gain:.1f} % shorter steps than with the default of {shown(default)}"
            text = f"chose {rival}: {text}, noise {100 * verdict.noise:.1f} %"
        elif not verdict.pairs:
            text = f"kept the default of {shown(default)}: no other setting had a shorter step"
        else:
            text = f"{100 * verdict.gain:+.1f} % in {verdict.pairs} pairs, noise {100 * verdict.noise:.1f} %"
            text = f"kept the default of {shown(default)}: {rival} did not gain enough ({text})"
        note(f"{text}; {self.steps} steps, {self.trials.count} trials")
