"""Devices are assigned from made-up lists: no GPU is needed."""

from __future__ import annotations

import pytest

from configs.schema import PlacementConfig
from workers.devices import assign_devices, parse_visible, planned_devices, visible_devices

EIGHT = tuple(str(index) for index in range(8))
UUIDS = tuple(f"GPU-{index}{index}aa-bbcc" for index in range(8))


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        ("0,1,2", ("0", "1", "2")),
        (" 4 , 2,7 ", ("4", "2", "7")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("3,x,1", ("3",)),
        ("1,0,1", ()),
        ("1,01", ()),
        ("NoDevFiles", ()),
        ("GPU-11aa,GPU-22bb", ("GPU-11aa", "GPU-22bb")),
        ("GPU-11aa,1", ("GPU-11aa",)),
        ("1,GPU-11aa", ("1",)),
        ("MIG-aa11,MIG-bb22", ("MIG-aa11", "MIG-bb22")),
        ("GPU-", ()),
    ],
)
def test_a_visible_list_is_read_as_the_driver_reads_it(value: str, entries: tuple[str, ...]) -> None:
    assert parse_visible(value) == entries


def test_without_the_variable_all_gpus_are_visible_and_no_more_than_exist_with_it() -> None:
    assert visible_devices({}, 3) == ("0", "1", "2")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "5,6"}, 2) == ("5", "6")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1,99"}, 1) == ("1",)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, 0) == ()


@pytest.mark.parametrize("visible", [None, ()])
def test_without_gpus_everything_is_on_the_cpu_and_sees_no_gpu(visible: tuple[str, ...] | None) -> None:
    assigned = assign_devices(PlacementConfig(), visible)
    assert assigned.trainer.device == assigned.validation.device == "cpu"
    assert [item.device for item in assigned.rollout] == ["cpu", "cpu"]
    assert {item.env["CUDA_VISIBLE_DEVICES"] for item in (*assigned.rollout, assigned.validation)} == {""}
    assert assigned.trainer.env == {}
    assert len(assign_devices(PlacementConfig(rollout_workers=3), visible).rollout) == 3


def test_one_gpu_is_shared_by_all_three() -> None:
    assigned = assign_devices(PlacementConfig(), ("6",))
    assert assigned.trainer.device == "cuda:0"
    assert [(item.device, item.entry, item.env) for item in (*assigned.rollout, assigned.validation)] == [
        ("cuda:0", "6", {"CUDA_VISIBLE_DEVICES": "6"})
    ] * 2


def test_eight_gpus_are_one_for_trainer_and_validation_and_seven_for_rollouts() -> None:
    assigned = assign_devices(PlacementConfig(), EIGHT)
    assert (assigned.trainer.device, assigned.trainer.entry) == ("cuda:0", "0")
    assert (assigned.validation.device, assigned.validation.entry) == ("cuda:0", "0")
    assert [item.entry for item in assigned.rollout] == list(EIGHT[1:])
    assert {item.device for item in assigned.rollout} == {"cuda:0"}
    assert [item.env["CUDA_VISIBLE_DEVICES"] for item in assigned.rollout] == [f"{index},0" for index in range(1, 8)]
    assert assigned.validation.env == {"CUDA_VISIBLE_DEVICES": "0"}


def test_indices_count_within_a_list_with_gaps_and_children_get_its_entries() -> None:
    placement = PlacementConfig(trainer="cuda:1", rollout=["cuda:2", "cuda:0", "cuda:2"], validation="cuda:0")
    assigned = assign_devices(placement, ("7", "3", "5"))
    assert (assigned.trainer.device, assigned.trainer.entry) == ("cuda:1", "3")
    assert [item.env["CUDA_VISIBLE_DEVICES"] for item in assigned.rollout] == ["5,3", "7,3", "5,3"]
    assert assigned.validation.env == {"CUDA_VISIBLE_DEVICES": "7,3"}


def test_an_automatic_trainer_avoids_gpus_that_are_given_away_and_automatic_rollouts_do_too() -> None:
    assigned = assign_devices(PlacementConfig(rollout=["cuda:0", "cuda:1"]), EIGHT[:3])
    assert assigned.trainer.entry == assigned.validation.entry == "2"
    assigned = assign_devices(PlacementConfig(rollout=["cuda:0", "cuda:1"]), EIGHT[:2])
    assert assigned.trainer.entry == "0"
    assigned = assign_devices(PlacementConfig(trainer="cuda:3", validation="cuda:1"), EIGHT[:4])
    assert [item.entry for item in assigned.rollout] == ["0", "2"]
    assigned = assign_devices(PlacementConfig(trainer="cuda:0", validation="cuda:1"), EIGHT[:2])
    assert [item.entry for item in assigned.rollout] == ["1"]


def test_a_number_of_rollout_workers_is_spread_round_the_gpus() -> None:
    assert [item.entry for item in assign_devices(PlacementConfig(rollout_workers=5), EIGHT[:3]).rollout] == ["1", "2", "1", "2", "1"]
    assert [item.entry for item in assign_devices(PlacementConfig(rollout_workers=2), EIGHT).rollout] == ["1", "2"]
    assert [item.entry for item in assign_devices(PlacementConfig(rollout_workers=2), ("4",)).rollout] == ["4", "4"]


def test_a_worker_on_the_cpu_still_sees_the_gpu_whose_weights_it_reads() -> None:
    assigned = assign_devices(PlacementConfig(trainer="cuda:1", rollout=["cpu"], validation="cpu"), ("4", "5"))
    assert [(item.device, item.env["CUDA_VISIBLE_DEVICES"]) for item in (*assigned.rollout, assigned.validation)] == [("cpu", "5")] * 2


def test_a_trainer_on_the_cpu_leaves_every_gpu_to_the_rollouts() -> None:
    assigned = assign_devices(PlacementConfig(trainer="cpu"), ("0", "1"))
    assert assigned.trainer.device == assigned.validation.device == "cpu"
    assert [item.env["CUDA_VISIBLE_DEVICES"] for item in assigned.rollout] == ["0", "1"]


def test_gpus_may_be_named_by_uuid_whatever_the_visible_list_has() -> None:
    by_index = assign_devices(PlacementConfig(trainer="GPU-55aa", rollout=["GPU-22aa-bbcc"]), EIGHT, UUIDS)
    assert (by_index.trainer.device, by_index.rollout[0].env["CUDA_VISIBLE_DEVICES"]) == ("cuda:5", "2,5")
    # torch reports UUIDs without the prefix.
    bare = assign_devices(PlacementConfig(trainer="GPU-55aa"), EIGHT, [uuid.removeprefix("GPU-") for uuid in UUIDS])
    assert bare.trainer.entry == "5"
    by_uuid = assign_devices(PlacementConfig(trainer="GPU-55", rollout=["cuda:0"]), ("GPU-77aa-bbcc", "GPU-55aa-bbcc"))
    assert by_uuid.trainer.device == "cuda:1"
    assert by_uuid.rollout[0].env == {"CUDA_VISIBLE_DEVICES": "GPU-77aa-bbcc,GPU-55aa-bbcc"}


def test_a_mig_instance_is_the_only_device_of_its_process() -> None:
    assigned = assign_devices(PlacementConfig(rollout=["MIG-bb"]), ("MIG-aa11", "MIG-bb22"))
    assert assigned.trainer.entry == "MIG-aa11"
    assert (assigned.rollout[0].device, assigned.rollout[0].env) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-bb22"})


@pytest.mark.parametrize(
    ("placement", "visible", "said"),
    [
        (PlacementConfig(trainer="cuda:2"), ("4", "5"), r"placement\.trainer: 'cuda:2' does not exist; there are cpu, cuda:0 \(4\), cuda:1 \(5\)"),
        (PlacementConfig(rollout=["cuda:0", "cuda:9"]), EIGHT[:2], r"placement\.rollout\.1: 'cuda:9' does not exist; there are cpu, cuda:0, cuda:1"),
        (PlacementConfig(validation="cuda"), None, r"placement\.validation: 'cuda' does not exist; no GPU is visible, only cpu"),
        (PlacementConfig(trainer="gpu0"), EIGHT[:1], r"'gpu0' is no device; write auto, cpu, cuda:<index> or a GPU's UUID"),
        (PlacementConfig(trainer="cuda:-1"), EIGHT[:1], r"'cuda:-1' is no device"),
        (PlacementConfig(trainer="GPU-zz"), EIGHT, r"no visible GPU has the UUID 'GPU-zz'.*GPU-00aa-bbcc"),
        (PlacementConfig(trainer="GPU-"), EIGHT, r"'GPU-' is no device"),
        (PlacementConfig(rollout=[]), EIGHT, r"placement\.rollout: at least one device is needed"),
    ],
)
def test_an_impossible_device_is_refused_and_the_message_says_what_exists(
    placement: PlacementConfig, visible: tuple[str, ...] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        assign_devices(placement, visible, UUIDS)


def test_an_ambiguous_uuid_is_refused() -> None:
    with pytest.raises(ValueError, match="fits several GPUs"):
        assign_devices(PlacementConfig(trainer="GPU-1"), ("GPU-11aa", "GPU-12bb"))


def test_a_plan_counts_gpus_that_one_does_not_have() -> None:
    placement = PlacementConfig(plan_gpus=4)
    assert planned_devices(placement, None) == ("0", "1", "2", "3")
    assert len(assign_devices(placement, planned_devices(placement, ())).rollout) == 3
    assert planned_devices(PlacementConfig(plan_gpus=0), EIGHT) == ()
    assert planned_devices(PlacementConfig(), ("4", "2")) == ("4", "2")
