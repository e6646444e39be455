"""The last steps of a run in Ray's own dashboard: Jobs > the job > Task Timeline > Download, a file for Perfetto.

Ray draws a slice for each profile event of a task. So every rank gets made-up tasks, whose profile events are what the
rank computed, with the times that were measured, sent to Ray's control store (GCS) as workers send theirs. A replica is
a process ('Node pentad dp0'), a rank a thread ('worker:0003' is rank 3). Transfers and collectives are left out: they
run beside compute, and the slices of a thread must nest. The run folder's trace.json.gz has them, with arrows.

The GCS keeps the newest KEPT_SPANS events of a task, so a rank takes its few tasks in turn, again and again: the job's
list of tasks does not grow.

Measured on two cores: a push of 520 slices (4 ranks, 5 steps of the quickstart) takes 3 to 5 ms of a thread
of its own, at most once a second, and `steps` 0.1 ms of the driver's; 96 000 slices (64 ranks) take 0.4 s, every 21 s.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import ray

from pentad.orchestrator.monitoring.run_state import RunView
from pentad.schedules.draw.palette import look
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.mesh import Coordinates

REST_SECONDS = 1.0  # least time between two pushes
SHARE = 0.02  # most of the time that is spent in pushes
DEADLINE_SECONDS = 2.0
KEPT_SPANS = 1000  # Ray's default of task_events_max_num_profile_events_per_task
MOST_TASKS = 128  # of all ranks together: a file of 50 MB at most
# Nanoseconds between slices that touch: the dashboard rounds times by half of that, and Perfetto drops what overlaps.
GAP = 1000
# Ray's dashboard colours a slice by the name of an event of its own: those that give the colours of our drawings.
EVENT_OF_COLOUR = {
    "rail_response": "task",
    "rail_idle": "task:store_outputs",
    "rail_load": "task:deserialize_arguments",
    "rail_animation": "task:execute",
}


class Row(NamedTuple):
    """Where Ray shows a rank: the title of its process, the bytes whose hexadecimal form is the rank, its coordinates,
    and its number among the rows of the job."""

    process: str
    thread: bytes
    name: str
    number: int


class Step(NamedTuple):
    """The spans of a step over all ranks, and the rows of the mesh that ran it, by rank."""

    rows: dict[int, Row]
    spans: tuple[Span, ...]


class RayTimeline:
    """A Watcher. What goes wrong is said once, through `note` and in the caller's thread; the run goes on without."""

    def __init__(self, keep: int, note: Callable[[str], None]) -> None:
        """Ray has at least the last `keep` steps; 0 publishes nothing. Of ranks beyond MOST_TASKS, and of a rank's
        spans in a step beyond KEPT_SPANS, it may not have all."""
        self._keep, self._note = keep, note
        self._wall = time.time_ns() - time.monotonic_ns()
        self._numbers: dict[Coordinates, int] = {}
        self._rows: dict[int, Row] = {}
        self._pending: deque[Step] = deque(maxlen=keep)
        self._changed = threading.Condition()
        self._closing = False
        self._trouble: str | None = None
        self._said = False
        self._thread: threading.Thread | None = None

    def plan(self, view: RunView) -> None:
        self._rows = {}
        for rank in sorted(view.ranks, key=lambda rank: rank.coordinates):
            at = rank.coordinates
            number = self._numbers.setdefault(at, len(self._numbers))
            if number < MOST_TASKS:
                self._rows[rank.rank] = Row(f"pentad dp{at.dp}", _spelled(rank.rank), str(at), number)

    def steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        self._tell()
        if not self._keep or not self._rows:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ray-timeline", daemon=True)
            self._thread.start()
        with self._changed:
            self._pending.extend(Step(self._rows, step) for step in spans)
            self._changed.notify_all()

    def view(self, view: RunView) -> None:
        self._tell()

    def event(self, entry: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        """Pushes what is left; waits for DEADLINE_SECONDS at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(DEADLINE_SECONDS)
        self._tell()

    def _tell(self) -> None:
        if self._trouble is not None and not self._said:
            self._said = True
            self._note(f"the timeline in Ray's dashboard lacks steps: {self._trouble}")

    def _work(self) -> None:
        try:
            with _channel() as channel:
                push = _Push(channel, self._keep, self._wall)
                while steps := self._newest():
                    began = time.monotonic()
                    self._attempt(lambda: push.steps(steps))
                    spent = time.monotonic() - began
                    self._rest(max(REST_SECONDS, spent / SHARE) - spent)
                self._attempt(push.finish)
        except Exception as error:  # Ray's interface is another one
            self._trouble = f"{type(error).__name__}: {error}"

    def _attempt(self, push: Callable[[], None]) -> None:
        """A push that does not get through now may do so later."""
        try:
            push()
        except grpc.RpcError as error:
            self._trouble = f"{error.code().name}: {error.details()}"

    def _newest(self) -> list[Step]:
        """The steps since the last push, as soon as there are any; none when the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            steps = list(self._pending)
            self._pending.clear()
            return steps

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)


class _Push:
    """Writes steps into the GCS, where `channel` leads; `wall` nanoseconds bring the spans' clock to the wall's."""

    def __init__(self, channel: grpc.Channel, keep: int, wall: int) -> None:
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

        self.request = gcs_service_pb2.AddTaskEventDataRequest
        self.add = gcs_service_pb2_grpc.TaskInfoGcsServiceStub(channel).AddTaskEventData
        self.metadata = [("ray_cluster_id", _driver().gcs_client.cluster_id.hex())]
        self.job = _driver().current_job_id.binary()
        self.keep, self.wall = keep, wall
        self.count = 0
        self.tasks: set[bytes] = set()

    def steps(self, steps: Sequence[Step]) -> None:
        """Raises grpc.RpcError when they do not get through in time."""
        request = self.request()
        for step in steps:
            for rank, spans in _by_rank(step).items():
                self._task(request, step.rows[rank], spans, len(step.rows))
            self.count += 1
        self._send(request)

    def finish(self) -> None:
        """Else Ray would call the tasks of an ended job failed."""
        request = self.request()
        for task in sorted(self.tasks):
            events = request.data.events_by_task.add(task_id=task, job_id=self.job)
            events.state_updates.state_ts_ns[_states().Value("FINISHED")] = time.time_ns()
        self._send(request)

    def _send(self, request: Any) -> None:
        request.data.job_id = self.job
        reply = self.add(request, timeout=DEADLINE_SECONDS, metadata=self.metadata)
        if reply.status.code:
            raise RuntimeError(f"the GCS answers {reply.status.message}")

    def _task(self, request: Any, row: Row, spans: list[Span], ranks: int) -> None:
        task = self._id(row, self.count % _tasks_a_rank(len(spans), self.keep, ranks))
        self.tasks.add(task)
        events = request.data.events_by_task.add(task_id=task, job_id=self.job)
        info = events.task_info
        info.name, info.func_or_class_name = f"step {spans[0].step} {row.name}", "pentad.step"
        info.task_id, info.job_id = task, self.job
        # Tasks that run are the last that the GCS forgets.
        events.state_updates.state_ts_ns[_states().Value("RUNNING")] = self._time(spans[0].start)
        profile = events.profile_events
        profile.component_type, profile.component_id, profile.node_ip_address = "worker", row.thread, row.process
        limits = [*(self._time(span.start) - GAP for span in spans[1:]), self._time(spans[-1].end)]
        for span, limit in zip(spans, limits, strict=True):
            start = self._time(span.start)
            end = max(start, min(self._time(span.end), limit))
            profile.events.add(event_name=span.op, extra_data=json.dumps(_facts(span)), start_time=start, end_time=end)

    def _id(self, row: Row, slot: int) -> bytes:
        """The dashboard sorts tasks by their ids and shows the first 10 000: ours come first, ranks in order."""
        return bytes(3) + row.number.to_bytes(3) + slot.to_bytes(2) + b"\xff" * 12 + self.job

    def _time(self, seconds: float) -> int:
        return round(seconds * 1e9) + self.wall


def _channel() -> grpc.Channel:
    """With the token and the certificates that Ray's own connections have."""
    from ray._private.grpc_utils import init_grpc_channel

    return init_grpc_channel(_driver().gcs_client.address)


def _driver() -> Any:
    """This process's end of Ray; the public way to it would start a cluster where there is none."""
    return ray._private.worker.global_worker


def _states() -> Any:
    from ray.core.generated.common_pb2 import TaskStatus

    return TaskStatus


def _spelled(rank: int) -> bytes:
    """The bytes whose hexadecimal digits are the rank's decimal ones."""
    digits = str(rank)
    return bytes.fromhex(digits.zfill(max(4, len(digits) + len(digits) % 2)))


def _tasks_a_rank(spans: int, keep: int, ranks: int) -> int:
    """As many as hold `keep` steps of that many spans."""
    steps_a_task = max(1, KEPT_SPANS // spans)
    return max(1, min(-(-keep // steps_a_task), MOST_TASKS // ranks))


def _by_rank(step: Step) -> dict[int, list[Span]]:
    """What each rank's row shows."""
    found: dict[int, list[Span]] = {}
    for span in sorted(step.spans, key=lambda span: span.start):
        if span.rank in step.rows and (span.lane == "compute" or span.op == "NORM"):
            found.setdefault(span.rank, []).append(span)
    return {rank: list(_joined(spans)) for rank, spans in found.items()}


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Spans of a rank by start; those that overlap, as the halves of a pair do, become one."""
    last = spans[0]
    for span in spans[1:]:
        if span.start < last.end:
            last = last._replace(name=f"{last.name} + {span.name}", end=max(last.end, span.end))
        else:
            yield last
            last = span
    yield last


def _facts(span: Span) -> dict[str, Any]:
    colour = EVENT_OF_COLOUR.get(look(span.op).cname, "")
    return {"name": span.name, "cname": colour, "step": span.step, "stage": span.stage, "microbatch": span.microbatch}
