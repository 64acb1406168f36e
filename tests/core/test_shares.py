"""A graph's share of a plan of several."""

from __future__ import annotations

from shoal.core.residence import Encode, Keep, Offload, Recompute, Residence
from shoal.core.shares import NO_OTHERS, OtherTransfers, Share, in_share, other_transfers, split_name
from tests.core.test_joined_step import layer_of_two_ops

SHARE: dict[str, Residence] = {
    "hidden": Offload("part+1.first", "part+2.first_back"),
    "y": Offload("second", "part+1.first_back"),
    "x": Recompute(("first_back",)),
    "part-1.hidden": Offload("second", "part+1.first_back"),
    "part-2.hidden": Offload("part-1.first", "first_back"),
    "part-1.y": Offload("part-1.second", "first_back"),
}


def test_names_of_other_graphs_say_how_far_away_they_run() -> None:
    assert [in_share(distance, "a.b") for distance in (0, 1, -12)] == ["a.b", "part+1.a.b", "part-12.a.b"]
    assert [split_name(in_share(distance, "a.b")) for distance in (0, 1, -12)] == [(d, "a.b") for d in (0, 1, -12)]
    assert split_name("part1.relu") == (0, "part1.relu")


def test_without_others_a_graph_moves_its_storages_within_its_own_passes() -> None:
    assert Share(SHARE).alone(layer_of_two_ops(4)).residences == {
        "hidden": Offload("second", "second_back"),
        "y": Offload("second", "second_back"),
        "x": Recompute(("first_back",)),
    }
    encoded = Encode("linear", 0, None, "hidden_encoded", Offload("part+1.first", "first_back"))
    (found,) = Share({"hidden": encoded}).alone(layer_of_two_ops(4)).residences.values()
    assert found == Encode("linear", 0, None, "hidden_encoded", Offload("second", "first_back"))


def test_what_graphs_do_for_each_other_is_read_from_the_share() -> None:
    assert other_transfers(Share(SHARE)) == OtherTransfers(
        {"second": ((-1, "hidden"),)}, {"first_back": ((-2, "hidden"), (-1, "y"))}, frozenset({"hidden"})
    )
    assert other_transfers(Share({"hidden": Offload("second", "second_back"), "x": Keep()})) == NO_OTHERS
    assert not NO_OTHERS
