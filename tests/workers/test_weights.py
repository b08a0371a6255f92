"""Weights in transit, with real processes at the other end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.layout import checksum
from workers.slots import HostSlots, check_capacity
from workers.weights import TornReadError, WeightHandle, WeightLayout, WeightPublisher, WeightReader, choose_transport

CPU = torch.device("cpu")
ANSWER_S = 60.0  # the longest that a child may take to start or to answer
SPAWN = multiprocessing.get_context("spawn")


def assorted() -> dict[str, torch.Tensor]:
    """Odd sizes, several dtypes, no dimension, no element, a tie, and one that is not contiguous."""
    torch.manual_seed(0)
    tied = torch.randn(7, 3).to(torch.bfloat16)
    return {
        "embed": tied,
        "norm": torch.randn(5),
        "scale": torch.tensor(2.5),
        "count": torch.tensor([1, 2, 3], dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
        "turned": torch.randn(3, 11).t(),
        "head": tied,
        "byte": torch.tensor([9], dtype=torch.uint8),
    }


def uniform(version: int, elements: int = 1 << 20) -> dict[str, torch.Tensor]:
    return {"a": torch.full((elements,), float(version)), "b": torch.full((3, 5), float(version))}


def publisher(tensors: dict[str, torch.Tensor], slots: int = 3, timeout_s: float = 60.0, **kwargs: Any) -> WeightPublisher:
    return WeightPublisher(tensors, slots=slots, transport="auto", device=CPU, timeout_s=timeout_s, **kwargs)


def nobody(seconds: float) -> None:
    raise AssertionError("a slot was free, nothing had to be waited for")


@contextmanager
def child(target: Any, *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A spawned process with a pipe to it; both are gone afterwards."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.join(ANSWER_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError("the child had not ended")


def receive(connection: Connection) -> Any:
    assert connection.poll(ANSWER_S), "the child does not answer"
    return connection.recv()


# Layout


def test_views_hold_what_was_published_for_every_kind_of_tensor() -> None:
    tensors = assorted()
    weights = publisher(tensors)
    slot = weights.publish(tensors, 0, wait=nobody)
    views = WeightReader(weights.handle, CPU).views(slot, 0)
    assert list(views) == list(tensors)
    for name, tensor in tensors.items():
        assert views[name].dtype == tensor.dtype and views[name].shape == tensor.shape
        assert torch.equal(views[name], tensor), name
        assert views[name].numel() == 0 or views[name].data_ptr() % 64 == 0
    weights.close()


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    tied = torch.randn(1000)
    layout = WeightLayout.from_tensors({"a": tied, "b": tied})
    assert layout.names == ("a", "b") and layout.nbytes == 4032
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    assert views["a"] is views["b"]
    assert WeightLayout.from_tensors({"a": tied, "b": tied.clone()}).nbytes == 2 * 4032


def test_equal_tensors_that_are_not_the_same_memory_are_not_tied() -> None:
    layout = WeightLayout.from_tensors({"a": torch.empty(0), "b": torch.empty(0), "c": torch.zeros(4), "d": torch.zeros(4)})
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    assert views["c"].data_ptr() != views["d"].data_ptr()


def test_weights_that_do_not_fit_the_layout_are_refused_before_anything_is_written() -> None:
    tied = torch.zeros(2)
    start = {"a": tied, "b": tied, "c": torch.zeros(3, dtype=torch.bfloat16), "n": torch.zeros(1, dtype=torch.int64)}
    weights = publisher(start, slots=2)
    slot = weights.publish(start, 0, wait=nobody)
    for change, said in (
        ({"c": None}, "missing: c"),
        ({"x": torch.zeros(1)}, "not in the layout: x"),
        ({"c": torch.zeros(4, dtype=torch.bfloat16)}, r"c is bfloat16\[4\], was bfloat16\[3\]"),
        ({"n": torch.zeros(1)}, r"n is float32\[1\], was int64\[1\]"),
        ({"b": torch.zeros(2)}, "no longer tied: b and a"),
    ):
        faulty = {name: tensor for name, tensor in {**start, **change}.items() if tensor is not None}
        with pytest.raises(ValueError, match=said):
            weights.publish(faulty, 1, wait=nobody)
    assert weights.newest == (0, slot)
    with pytest.raises(ValueError, match="no parameters"):
        WeightLayout.from_tensors({})


def test_master_weights_in_float32_are_published_as_bfloat16() -> None:
    master = {"w": torch.randn(257)}
    weights = publisher({"w": torch.empty(257, dtype=torch.bfloat16)})
    slot = weights.publish(master, 0, wait=nobody)
    assert torch.equal(WeightReader(weights.handle, CPU).views(slot, 0)["w"], master["w"].to(torch.bfloat16))


# Checksum


@given(st.integers(1, 3000), st.data())
@settings(max_examples=30, deadline=None)
def test_the_checksum_depends_on_every_bit(lines: int, data: st.DataObject) -> None:
    buffer = torch.arange(lines * 64, dtype=torch.int64).mul_(2654435761).bitwise_right_shift(7).to(torch.uint8)
    before = checksum(buffer)
    flips = data.draw(st.sets(st.tuples(st.integers(0, lines * 64 - 1), st.integers(0, 7)), min_size=1, max_size=3))
    for position, bit in flips:
        buffer[position] ^= 1 << bit
    assert checksum(buffer) != before
    for position, bit in flips:
        buffer[position] ^= 1 << bit
    assert checksum(buffer) == before


def test_the_checksum_depends_on_order_and_length_and_on_sign_bits_alone() -> None:
    buffer = torch.zeros(64 * 2048, dtype=torch.uint8)
    seen = {checksum(buffer), checksum(buffer[:-64])}
    for position in (7, 15, 64 * 1024 + 7):  # the top bit of a 64-bit word
        buffer[position] = 128
        seen.add(checksum(buffer))
    rows = buffer.view(-1, 32 * 1024)
    seen.add(checksum(rows.flip(0).contiguous().view(-1)))
    assert len(seen) == 6


# Leases


class Schedule:
    """A publisher beside a model of what it must do; its clock moves only when it waits."""

    def __init__(self, slots: int) -> None:
        self.now = 0.0
        self.weights = publisher(uniform(0, 64), slots=slots, timeout_s=1.0, clock=lambda: self.now)
        self.slots = slots
        self.version = -1
        self.held: dict[tuple[str, int], int] = {}  # (holder, version) -> slot

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def publish(self) -> None:
        leased = set(self.held.values())
        if len(leased) == self.slots:
            with pytest.raises(TimeoutError) as raised:
                self.weights.publish(uniform(self.version + 1, 64), self.version + 1, wait=self.wait)
            assert all(holder in str(raised.value) for holder, _ in self.held)
            return
        before = self.weights.newest
        slot = self.weights.publish(uniform(self.version + 1, 64), self.version + 1, wait=nobody)
        self.version += 1
        assert slot not in leased, "a leased slot was overwritten"
        assert before is None or slot != before[1] or self.slots - len(leased) == 1, "the newest was overwritten though another was free"
        assert self.weights.newest == (self.version, slot)

    def lease(self, holder: str) -> None:
        newest = self.weights.newest
        if newest is not None:
            self.weights.lease(newest[1], holder, newest[0])
            self.held[holder, newest[0]] = newest[1]

    def release(self, how: str, holder: str, version: int) -> None:
        ends = {"release": lambda v: v <= version, "release_exact": lambda v: v == version, "release_all": lambda v: True}[how]
        arguments = (holder,) if how == "release_all" else (holder, version)
        getattr(self.weights, how)(*arguments)
        self.held = {key: slot for key, slot in self.held.items() if not (key[0] == holder and ends(key[1]))}

    def check(self) -> None:
        expected: dict[int, set[str]] = {}
        for (holder, version), slot in self.held.items():
            expected.setdefault(slot, set()).add(holder)
            assert all(bool((tensor == version).all()) for tensor in self.weights.views(slot).values())
        assert self.weights.leases() == {slot: tuple(sorted(names)) for slot, names in expected.items()}


_HOLDERS = st.sampled_from(["rollout-0", "rollout-1", "validation"])
_ACTIONS = st.one_of(
    st.just(("publish",)),
    st.tuples(st.just("lease"), _HOLDERS),
    st.tuples(st.sampled_from(["release", "release_exact"]), _HOLDERS, st.integers(0, 12)),
    st.tuples(st.just("release_all"), _HOLDERS, st.just(0)),
)


@given(st.integers(2, 4), st.lists(_ACTIONS, max_size=60))
@settings(max_examples=80, deadline=None)
def test_no_schedule_of_leases_lets_a_leased_slot_be_overwritten(slots: int, actions: list[tuple[Any, ...]]) -> None:
    schedule = Schedule(slots)
    for action in actions:
        if action[0] == "publish":
            schedule.publish()
        elif action[0] == "lease":
            schedule.lease(action[1])
        else:
            schedule.release(*action)
        schedule.check()
    schedule.weights.close()


def test_a_publication_waits_until_the_caller_has_brought_about_a_release() -> None:
    weights = publisher(uniform(0, 64), slots=2)
    first = weights.publish(uniform(0, 64), 0, wait=nobody)
    weights.lease(first, "validation", 0)
    second = weights.publish(uniform(1, 64), 1, wait=nobody)
    weights.lease(second, "rollout-0", 1)
    waits: list[float] = []

    def handle_messages(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            weights.release("rollout-0", 1)

    assert weights.publish(uniform(2, 64), 2, wait=handle_messages) == second
    assert len(waits) == 3 and weights.leases() == {first: ("validation",)}


def test_a_timeout_names_every_holder_and_its_version() -> None:
    now = [0.0]
    weights = publisher(uniform(0, 64), slots=2, timeout_s=3.0, clock=lambda: now[0])
    for version, holder in enumerate(("validation", "rollout-1")):
        weights.lease(weights.publish(uniform(version, 64), version, wait=nobody), holder, version)

    def wait(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(TimeoutError, match=r"version 2 .* weights\.timeout_s = 3 s.*\(version 0\): validation; .*\(version 1\): rollout-1"):
        weights.publish(uniform(2, 64), 2, wait=wait)
    assert now[0] >= 3.0
    weights.release_all("rollout-1")
    weights.publish(uniform(2, 64), 2, wait=nobody)


def test_an_error_while_waiting_reaches_the_caller_and_leaves_everything_in_place() -> None:
    weights = publisher(uniform(0, 64), slots=2)
    for version in range(2):
        weights.lease(weights.publish(uniform(version, 64), version, wait=nobody), "rollout-0", version)

    def dead(seconds: float) -> None:
        raise RuntimeError("rollout-0 died")

    with pytest.raises(RuntimeError, match="rollout-0 died"):
        weights.publish(uniform(2, 64), 2, wait=dead)
    assert weights.newest is not None and weights.newest[0] == 1
    assert sum(map(len, weights.leases().values())) == 2


def test_a_copy_that_fails_halfway_leaves_a_slot_that_nobody_can_read_and_that_is_used_next() -> None:
    weights = publisher(uniform(0, 64), slots=2)
    kept = weights.publish(uniform(0, 64), 0, wait=nobody)
    broken = {"a": torch.full((64,), 1.0), "b": torch.empty(3, 5, device="meta")}
    with pytest.raises(NotImplementedError):
        weights.publish(broken, 1, wait=nobody)
    assert weights.newest == (0, kept)
    with pytest.raises(TornReadError):
        WeightReader(weights.handle, CPU).views(1 - kept, 1)
    assert weights.publish(uniform(1, 64), 1, wait=nobody) == 1 - kept
    assert WeightReader(weights.handle, CPU).views(1 - kept, 1)["b"][0, 0] == 1


# Readers


def test_a_reader_without_a_lease_is_told_that_its_slot_was_overwritten() -> None:
    weights = publisher(uniform(0, 64), slots=2)
    reader = WeightReader(weights.handle, CPU)
    slot = weights.publish(uniform(0, 64), 0, wait=nobody)
    reader.views(slot, 0)
    reader.verify(slot, 0)
    with pytest.raises(TornReadError, match="slot 0 holds version 0, not version 7"):
        reader.views(slot, 7)
    weights.publish(uniform(1, 64), 1, wait=nobody)
    reader.verify(slot, 0)
    assert weights.publish(uniform(2, 64), 2, wait=nobody) == slot
    with pytest.raises(TornReadError, match="held version 0 and now holds version 2"):
        reader.verify(slot, 0)
    with pytest.raises(TornReadError):
        reader.views(slot, 0)


def test_a_reader_notices_that_its_slot_is_being_written() -> None:
    slots = HostSlots(1, 64)
    slots.begin(0)
    slots.commit(0, 4)
    assert slots.state(0)[0] == 4
    before = slots.state(0)
    slots.begin(0)
    assert slots.state(0)[0] == -1
    slots.begin(0)  # the write before failed
    slots.commit(0, 4)
    assert slots.state(0)[0] == 4 and slots.state(0) != before


def test_a_reader_in_the_publishers_own_process_sees_the_same_memory() -> None:
    weights = publisher(uniform(0, 64))
    slot = weights.publish(uniform(5, 64), 5, wait=nobody)
    views = WeightReader(weights.handle, CPU).views(slot, 5)
    assert views["a"].data_ptr() == weights.views(slot)["a"].data_ptr()


def _adopt_everything(handle: WeightHandle, connection: Connection) -> None:
    """A worker: adopts each announced version by copying, says so, and reports at the end what it saw."""
    reader = WeightReader(handle, CPU)
    mine = {name: torch.empty_like(view) for name, view in handle.layout.views(torch.zeros(handle.layout.nbytes, dtype=torch.uint8)).items()}
    while (message := connection.recv()) is not None:
        slot, version = message
        for name, view in reader.views(slot, version).items():
            mine[name].copy_(view)
        reader.verify(slot, version)
        values = {float(value) for tensor in mine.values() for value in (tensor.min(), tensor.max())}
        connection.send((version, sorted(values), reader.checksum(slot)))
    reader.close()


def test_every_version_that_a_process_adopts_is_whole_while_the_publisher_overwrites_as_fast_as_it_can() -> None:
    weights = publisher(uniform(0), slots=2)
    adopted: list[int] = []
    sums: dict[int, str] = {}
    with child(_adopt_everything, weights.handle) as (_, connection):
        announced = False

        def take(seconds: float) -> None:
            nonlocal announced
            if announced and connection.poll(seconds):
                version, values, digest = connection.recv()
                assert values == [float(version)], f"version {version} was torn: {values}"
                assert digest == sums[version]
                weights.release("worker", version)
                adopted.append(version)
                announced = False

        version = 0
        while len(adopted) < 60:
            slot = weights.publish(uniform(version), version, wait=take)
            if not announced:
                sums[version] = weights.checksum(slot)
                weights.lease(slot, "worker", version)
                connection.send((slot, version))
                announced = True
            take(0.0)
            version += 1
            assert version < 100_000, "the child adopts nothing"
        while announced:
            take(ANSWER_S)
        connection.send(None)
    assert adopted == sorted(adopted)
    assert version > len(adopted), "the publisher never ran ahead, so nothing was tried"


def _read_without_leases(handle: WeightHandle, connection: Connection) -> None:
    """Breaks the rule that a slot is read only under a lease, and counts what the header makes of it."""
    reader = WeightReader(handle, CPU)
    whole = torn = wrong = 0
    copy = torch.empty(1 << 20)
    while not connection.poll() and (torn < 20 or whole < 1):
        for slot in range(2):
            version = handle.host.state(slot)[0]
            if version < 0:
                continue
            try:
                copy.copy_(reader.views(slot, version)["a"])
                reader.verify(slot, version)
            except TornReadError:
                torn += 1
                continue
            whole += 1
            wrong += not bool((copy == version).all())
    connection.send((whole, torn, wrong))
    reader.close()


def test_reading_without_a_lease_is_noticed_every_time() -> None:
    weights = publisher(uniform(0), slots=2)
    weights.publish(uniform(0), 0, wait=nobody)
    with child(_read_without_leases, weights.handle) as (process, connection):
        version = 1
        while not connection.poll():
            weights.publish(uniform(version), version, wait=nobody)
            version += 1
            # Now and then a lull, in which a read can succeed.
            if version % 50 == 0:
                process.join(0.01)
        whole, torn, wrong = receive(connection)
    assert (torn >= 20, whole >= 1, wrong) == (True, True, 0)


def _answer_checksum(handle: WeightHandle, slot: int, version: int, connection: Connection) -> None:
    reader = WeightReader(handle, CPU)
    views = reader.views(slot, version)
    connection.send((reader.checksum(slot), {name: (tensor.dtype, tensor.tolist()) for name, tensor in views.items()}, views["embed"] is views["head"]))
    connection.poll(ANSWER_S)


def test_a_restarted_reader_gets_the_same_handle_and_sees_the_same_weights() -> None:
    tensors = assorted()
    weights = publisher(tensors)
    slot = weights.publish(tensors, 3, wait=nobody)
    expected = (weights.checksum(slot), {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}, True)
    with child(_answer_checksum, weights.handle, slot, 3) as (process, connection):
        assert receive(connection) == expected
        process.kill()
    with child(_answer_checksum, weights.handle, slot, 3) as (_, connection):
        assert receive(connection) == expected
    assert weights.checksum(slot) == expected[0]


def test_slots_of_a_killed_reader_are_free_after_release_all() -> None:
    weights = publisher(assorted(), slots=2)
    slot = weights.publish(assorted(), 0, wait=nobody)
    weights.lease(slot, "validation", 0)
    slot = weights.publish(assorted(), 1, wait=nobody)
    weights.lease(slot, "rollout-0", 1)
    with child(_answer_checksum, weights.handle, slot, 1) as (process, connection):
        receive(connection)
        process.kill()

        def look_at_peers(seconds: float) -> None:
            process.join(seconds)
            if process.exitcode == -signal.SIGKILL:
                weights.release_all("rollout-0")

        assert weights.publish(assorted(), 2, wait=look_at_peers) == slot


# Memory


def _publish_and_wait(memfd: bool, size: int, connection: Connection) -> None:
    slots = HostSlots(2, size, memfd=memfd)
    slots.tensor(1).fill_(1)
    connection.send(os.getpid())
    connection.poll(ANSWER_S)


@pytest.mark.parametrize("memfd", [True, False])
def test_nothing_is_left_in_dev_shm_when_the_publisher_is_killed(memfd: bool) -> None:
    size = 5_111_808 + 4096 * (os.getpid() % 1000)  # unlike anybody else's
    with child(_publish_and_wait, memfd, size) as (process, connection):
        assert receive(connection) == process.pid
        named = _suspects(size)
        process.kill()
        process.join(ANSWER_S)
        assert process.exitcode == -signal.SIGKILL
    assert named == _suspects(size) == []


def _suspects(size: int) -> list[str]:
    found = []
    for path in Path("/dev/shm").iterdir():
        try:
            nbytes = path.stat().st_size
        except FileNotFoundError:
            continue
        if path.name.startswith("tandem-weights") or 2 * size <= nbytes < 2 * size + (8 << 20):
            found.append(path.name)
    return found


def _sum(slots: HostSlots, connection: Connection) -> None:
    connection.send((len(slots), int(slots.tensor(1).sum())))


def test_the_fallback_without_memfd_reaches_another_process_too() -> None:
    slots = HostSlots(2, 100, memfd=False)
    slots.tensor(1).fill_(3)
    with child(_sum, slots) as (_, connection):
        assert receive(connection) == (2, 300)


def test_closing_gives_memory_and_descriptor_back() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("tandem-weights")

    before = held()
    weights = publisher(uniform(0, 64))
    weights.publish(uniform(0, 64), 0, wait=nobody)
    assert held()[0] > before[0] and held()[1] == before[1] + 1
    weights.close()
    weights.close()
    assert held() == before


def test_slots_that_do_not_fit_are_refused_with_the_numbers_and_what_would_fit() -> None:
    with pytest.raises(ValueError, match=r"weights\.slots: 3 slots of 14\.00 GB need 42\.00 GB of host memory, 30\.00 GB are free; set weights\.slots: 2 or"):
        check_capacity(14 * 10**9, 3, free=30 * 10**9)
    with pytest.raises(ValueError, match=r"20\.00 GB are free; free memory or use a smaller model"):
        check_capacity(14 * 10**9, 2, free=20 * 10**9)
    check_capacity(14 * 10**9, 2, free=28 * 10**9)
    with pytest.raises(ValueError, match="GB are free"):
        HostSlots(2, 1 << 50)
    with pytest.raises(ValueError, match="GB are free"):
        HostSlots(2, 1 << 50, memfd=False)


def test_cuda_ipc_without_a_gpu_is_refused_and_auto_is_host_memory() -> None:
    assert choose_transport("auto", CPU) == choose_transport("shared_memory", CPU) == "shared_memory"
    with pytest.raises(ValueError, match=r"weights\.transport: cuda_ipc needs a trainer on a GPU, it is on cpu; set weights\.transport: auto"):
        choose_transport("cuda_ipc", CPU)
