"""One run under faults, from its first command to its end.  Launchers that end too early are started again."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megabatch_lab.chaos.faults import LASTING, NEED_DISK, Fault, Kind, Timeline, Trigger
from megabatch_lab.chaos.judge import Watch, differences, phase_of, unfinished
from megabatch_lab.chaos.launcher import MESSAGES, WARNING, Launcher
from megabatch_lab.chaos.report import DisturbedRun, Injected
from megabatch_lab.chaos.site import ON_RANKS, Site, hold_s

POLL_S, POLL_FOR_WRITE_S, COUNT_RANKS_S = 5e-3, 5e-4, 0.1
MAX_ENDS = 6
ENDS_LAUNCHER: tuple[Kind, ...] = ("launcher", "all", "term", "disk to end", "host")  # in spite of --max-restarts
SLACK_S = 15.0  # beyond comm.timeout_s, to detect a rank that hangs in its steps


class Disturbance:
    def __init__(
        self,
        site: Site,
        outcome: DisturbedRun,
        faults: Sequence[tuple[Fault, Trigger]] = (),
        timeline: Timeline | None = None,  # of the undisturbed run; None for that run itself
        timeout_s: float = 0.0,  # comm.timeout_s
        patience_s: float = 600.0,  # gives up after this time without progress
    ) -> None:
        self.site, self.outcome, self.pending, self.timeline = site, outcome, deque(faults), timeline
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.watch = Watch(site.run)
        self.progress = self.watch.look()
        self.ended: set[str] = set()  # launchers that have finished
        self.is_abandoned = False
        self.open: Injected | None = None  # the newest fault, until the run has recovered
        self.struck_s = self.relief_s = 0.0
        self.known_ranks: dict[int, int] = {}
        self.log_bytes: dict[str, tuple[int, int]] = {}
        self.ranks: dict[int, int] = {}
        self.begun_s = self.attempt_s = self.counted_s = 0.0
        self.num_begun = self.struck_begun = 0  # attempts before this one, and before the fault
        self.num_ends = 0  # of launchers since the fault
        self.first_ranks_s: float | None = None  # of the first attempt, since the start
        self.seen_ranks_s: float | None = None  # of this attempt
        self.due_s: float | None = None  # time of the next fault, once known
        self.steps_s: list[tuple[float, int]] = []
        self.changed: tuple[object, float] = (None, time.monotonic())

    def run(self) -> None:
        self.begun_s = time.monotonic()
        try:
            for launcher in self.site.launchers:
                launcher.start()
            self.begin_attempt()
            while not self.is_abandoned and len(self.ended) < len(self.site.launchers):
                self.look()
                self.follow_fault()
                self.strike_if_due()
                self.replace_ended()
                self.give_up_if_hung()
                time.sleep(POLL_FOR_WRITE_S if self.pending and self.pending[0][0].at_write else POLL_S)
            self.look()  # reads rows written between the last look and the end
        finally:
            self.site.relieve()
            self.site.end()
        self.outcome.seconds = time.monotonic() - self.begun_s
        self.outcome.num_starts = sum(launcher.num_starts for launcher in self.site.launchers)

    def begin_attempt(self) -> None:
        """Reset the state of an attempt: ranks are being started by us or by their launcher."""
        self.attempt_s, self.num_begun = time.monotonic(), len(self.progress.begun_at)
        self.seen_ranks_s = self.due_s = None
        self.ranks, self.counted_s = {}, 0.0

    def look(self) -> None:
        now_s = time.monotonic()
        self.progress = self.watch.look()
        if not self.steps_s or self.progress.step > self.steps_s[-1][1]:
            self.steps_s += [(now_s - self.begun_s, self.progress.step)] if self.progress.step else []
        if now_s - self.counted_s > COUNT_RANKS_S:
            self.ranks, self.counted_s = self.site.ranks(), now_s
            fresh = set(self.ranks.values()) - set(self.known_ranks.values())
            if fresh and self.seen_ranks_s is None:
                self.seen_ranks_s = now_s
                self.first_ranks_s = self.first_ranks_s or now_s - self.begun_s

    @property
    def is_starting(self) -> bool:
        return len(self.progress.begun_at) <= self.num_begun

    def strike_if_due(self) -> None:
        if not self.pending or (self.open and self.open.noticed_s is None) or self.relief_s:
            return
        fault, trigger = self.pending[0]
        if self.is_due(fault, trigger):
            assert self.timeline
            self.progress = self.watch.look()  # if a write triggered the fault, its row was written before
            phase = phase_of(self.progress, self.is_starting, self.watch.is_writing(), self.timeline.num_steps)
            ranks, self.log_bytes = dict(self.ranks), {each.name: each.log_bytes() for each in self.site.launchers}
            victim = self.site.strike(fault, ranks)
            if victim is None:
                return  # the victim has just ended by itself
            self.pending.popleft()
            self.struck_s, self.known_ranks = time.monotonic(), ranks
            self.struck_begun, self.num_ends = len(self.progress.begun_at), 0
            self.open = Injected(kind=fault.kind, phase=phase, step=self.progress.step, victim=victim)
            self.outcome.faults.append(self.open)
            if fault.kind in LASTING:
                self.relief_s, self.due_s = self.struck_s + hold_s(fault), None
            elif fault.kind != "disk to end":
                self.begin_attempt()

    def is_due(self, fault: Fault, trigger: Trigger) -> bool:
        """Return True if it is time for the fault: by the clock during start-up, later by the step of the run."""
        assert self.timeline
        now_s = time.monotonic()
        if fault.kind in ON_RANKS and self.seen_ranks_s is None:
            return False
        if fault.at_write:
            return not self.is_starting and self.progress.is_at_work and self.watch.is_writing()
        if trigger.startup is not None and fault.kind in ON_RANKS:
            span_s = self.timeline.startup_s - self.timeline.ranks_s
            return now_s >= (self.seen_ranks_s or now_s) + trigger.startup * span_s
        if trigger.startup is not None:
            return now_s >= self.attempt_s + trigger.startup * self.timeline.startup_s
        if self.due_s is None and not self.is_starting and self.progress.is_at_work:
            self.due_s = now_s + trigger.delay_s if self.progress.step >= trigger.step else None
        return self.due_s is not None and now_s >= self.due_s

    def follow_fault(self) -> None:
        """Record when the newest fault was noticed, when it ended and when the run recovered from it."""
        fault, now_s = self.open, time.monotonic()
        if self.relief_s and now_s >= self.relief_s:
            self.site.relieve()
            self.relief_s = 0.0
        if fault is None:
            return
        if fault.noticed_s is None and fault.kind not in ("launcher", "all"):
            self.notice(fault)
        # Until then, the attempt is the one that was struck: a fault meant for start-up may come after its first step.
        has_ended = fault.restarted or not self.must_end(fault)
        is_new = has_ended and len(self.progress.begun_at) > self.struck_begun
        if is_new and fault.repeated is None:
            fault.repeated = max(0, fault.step - self.progress.begun_at[-1])
        resumes = fault.kind in LASTING and not self.relief_s and self.progress.step > fault.step
        if (is_new and self.progress.is_at_work) or resumes:
            fault.resumed_s = now_s - self.struck_s
            fault.repeated = fault.repeated or 0
            self.open = None
            if is_new and fault.kind == "disk" and fault.phase != "start-up" and not fault.restarted:
                self.outcome.problems.append(f"a full disk ended the ranks, which were restarted: {fault.message}")
        late_s = now_s - self.struck_s - self.timeout_s - SLACK_S
        if fault.kind == "stop" and fault.noticed_s is None and fault.phase != "start-up" and late_s > 0:
            self.abandon(
                f"{fault.victim} was stopped in phase {fault.phase} and not detected within {self.timeout_s:g} s"
            )

    def notice(self, fault: Injected) -> None:
        """Detect a reaction: a message, an exit or replaced ranks.  For a killed host, only other hosts count."""
        witnesses = [each for each in self.site.launchers if fault.kind != "host" or each.name != fault.victim]
        prefixes = (*MESSAGES, WARNING) if fault.kind in NEED_DISK else MESSAGES
        messages = [line for each in witnesses for line in each.messages(self.log_bytes[each.name], prefixes)]
        ended = any(each.exit_code is not None for each in witnesses if each.name not in self.ended)
        before, now = set(self.known_ranks.values()), set(self.ranks.values())
        victims = {process for rank, process in self.known_ranks.items() if fault.victim == f"rank {rank}"}
        counted_since = self.counted_s > self.struck_s and fault.kind not in ("host", *LASTING)
        replaced = bool(now - before or before - now - victims) and counted_since
        if messages or ended or replaced:
            fault.noticed_s = time.monotonic() - self.struck_s
            fault.message = fault.message or next(iter(messages), None)

    def replace_ended(self) -> None:
        for launcher in self.site.launchers:
            code = launcher.exit_code
            if code is None or launcher.name in self.ended:
                continue
            self.outcome.problems += launcher.traces.left()
            is_finished, self.num_ends = self.watch.is_finished(), self.num_ends + 1
            fault = self.open if self.num_ends <= self.explained_ends() else None
            messages = launcher.messages(self.log_bytes[launcher.name] if fault else (0, 0))
            if fault and fault.victim != launcher.name:
                fault.noticed_s = fault.noticed_s or time.monotonic() - self.struck_s
                fault.message = fault.message or next(iter(messages), None)
            if is_finished:
                self.ended.add(launcher.name)
            problem = judge_end(fault, code, is_finished, messages, launcher, self.site)
            self.outcome.problems += [problem] if problem else []
            if not is_finished and (fault is None or not code):
                self.is_abandoned = True
            elif not is_finished:
                self.start_again(launcher)

    def explained_ends(self) -> int:
        """Return how many launcher exits one fault explains: a disk may stay full, and hosts wait for each other."""
        if not self.outcome.faults:
            return 0
        return MAX_ENDS if self.site.hosts or self.outcome.faults[-1].kind == "disk" else 1

    def must_end(self, fault: Injected) -> bool:
        """Return True if the run cannot recover unless a command is started again."""
        return fault.kind in ENDS_LAUNCHER or (fault.kind in ("rank", "stop") and not self.site.max_restarts)

    def start_again(self, launcher: Launcher) -> None:
        assert self.open
        self.open.restarted = True
        if self.open.kind == "disk to end":
            self.site.relieve()
        launcher.end()
        self.progress = self.watch.look()  # none of its ranks writes any more
        self.struck_begun = len(self.progress.begun_at)
        launcher.start()
        self.begin_attempt()

    def give_up_if_hung(self) -> None:
        now_s = time.monotonic()
        starts = [each.num_starts for each in self.site.launchers]
        state = (self.progress.step, self.progress.begun_at, tuple(self.ranks.values()), starts, len(self.pending))
        if state != self.changed[0]:
            self.changed = state, now_s
        elif now_s - self.changed[1] > self.patience_s:
            after = f" after {self.open.kind} of {self.open.victim} in phase {self.open.phase}" if self.open else ""
            self.abandon(f"no progress for {self.patience_s:.0f} s{after}, at step {self.progress.step}")

    def abandon(self, problem: str) -> None:
        self.outcome.problems.append(problem)
        self.is_abandoned = True

    def timed(self) -> Timeline:
        assert self.first_ranks_s
        return Timeline(ranks_s=self.first_ranks_s, steps_s=self.steps_s, total_s=self.outcome.seconds)


def judge_end(
    fault: Injected | None, code: int, is_finished: bool, messages: Sequence[str], launcher: Launcher, site: Site
) -> str | None:
    """Return the problem with a launcher's exit; None if its run has finished or the fault explains it."""
    name, last = launcher.name, messages[-1] if messages else "no message"
    if not code:
        return None if is_finished else f"{name} ended with exit code 0 before the run was finished"
    if fault is None:
        since = " after its restart" if launcher.num_starts > 1 else ""
        return f"{name} ended with exit code {code} without a fault{since}: {last}"
    if is_finished:
        return None
    if fault.kind in ("rank", "stop") and not site.hosts:
        if site.max_restarts:
            return f"{fault.kind} of {fault.victim} ended the run, in spite of --max-restarts: {last}"
        if code < 0 or not messages:
            return f"{fault.kind} of {fault.victim} ended the run without a message, with exit code {code}"
    if fault.kind == "disk" and fault.phase != "start-up":
        return f"a full disk ended the run: {last}"
    if fault.kind == "disk to end" and not messages:
        return f"a disk that stays full ended the run without a message, with exit code {code}"
    return None


def check_end(outcome: DisturbedRun, expected: Path, run: Path) -> None:
    """Check that a finished run is bitwise identical to the expected one and left no partial files."""
    outcome.problems += [*differences(expected, run), *unfinished(run)]
