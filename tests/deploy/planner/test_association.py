"""Which device drafts for which server: the best of all associations, priced by the planner."""

from itertools import product

import numpy as np
import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy.planner.association import Association, Fleet, associate, between, total
from polybasic.deploy.planner.measuring.measurements import Measurements, PassCosts
from polybasic.deploy.planner.search import choose_plan
from polybasic.deploy.runtime.remote.link import Link
from tests.deploy.planner.machines import SMALL_GRID, make_measurements

GRID = SMALL_GRID.model_copy(update={"flush_lengths": (4, 8)})
COST = {"a": 4.0, "b": 0.5}


def measured(seed: int = 0) -> Measurements:
    """A target and an intermediate that proposes to it."""
    return make_measurements(seed, COST, {"b": 0.9}, drafters={}, num_traces=2)


def fleet_of(
    links: list[list[str | None]], speeds: list[float] | None = None, **most: int
) -> Fleet:
    """Devices d0, d1, ... with a link to each of s0, s1, ..., or none."""
    servers = {f"s{place}": {"sequences": most.get(f"s{place}")} for place in range(len(links[0]))}
    devices = {
        f"d{number}": {
            "speed": speeds[number] if speeds else 1.0,
            "links": {f"s{place}": link for place, link in enumerate(row) if link is not None},
        }
        for number, row in enumerate(links)
    }
    return Fleet.model_validate({"servers": servers, "devices": devices})


def servers_of(association: Association) -> list[str]:
    """Of the devices, in order."""
    return [pair.server for pair in association.pairs.values()]


def cheapest(measurements: Measurements, fleet: Fleet) -> float:
    """The least sum over every association, each pair planned by itself."""
    found: dict[tuple[str, str, int], float] = {}

    def seconds(device: str, server: str, load: int) -> float:
        settings = fleet.devices[device]
        if server not in settings.links or load > fleet.most_at(server):
            return float("inf")
        key = (device, server, load)
        if key not in found:
            link, speed = Link.of(settings.links[server]), fleet.servers[server].speed
            alike = between(measurements, link, settings.speed, speed, load)
            found[key] = choose_plan([alike], GRID.over_link).best.seconds_per_token
        return found[key]

    return min(
        sum(
            seconds(device, server, servers.count(server))
            for device, server in zip(fleet.devices, servers, strict=True)
        )
        for servers in product(fleet.servers, repeat=len(fleet.devices))
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_association_is_cheaper(seed: int) -> None:
    chance = np.random.default_rng(seed)
    links = [
        [None if chance.random() < 0.2 and place else f"{chance.uniform(0, 60):.1f}ms"
         for place in range(2 + seed % 2)]
        for _ in range(3)
    ]  # fmt: skip
    fleet = fleet_of(links, chance.uniform(0.2, 2, 3).tolist(), s1=1 + seed % 2)
    measurements = measured(seed)
    association = associate(measurements, fleet, GRID)
    assert total(association.pairs) == pytest.approx(cheapest(measurements, fleet))
    loads = [pair.num_devices for pair in association.pairs.values()]
    assert loads == [servers_of(association).count(server) for server in servers_of(association)]


def test_devices_part_where_rows_of_a_shared_pass_cost_something() -> None:
    fleet = fleet_of([["10ms", "11ms"], ["10ms", "11ms"]])
    base = measured()
    flat = PassCosts(base.passes["a"].rows, (4e-3,) * len(base.passes["a"].rows))
    steep = PassCosts(flat.rows, tuple(4e-3 * rows for rows in flat.rows))
    for costs, wanted in ((flat, ["s0", "s0"]), (steep, ["s0", "s1"])):
        made = Measurements(**{**vars(base), "passes": base.passes | {"a": costs}})
        association = associate(made, fleet, GRID)
        assert sorted(servers_of(association)) == wanted
        assert association.nearest is not None
        assert total(association.pairs) <= total(association.nearest)
        assert (total(association.pairs) < total(association.nearest)) == (costs is steep)


def test_a_pair_is_priced_by_its_link_its_speeds_and_the_devices_beside_it() -> None:
    base = measured()
    link = Link(0.03, 1e6)
    made = between(base, link, device_speed=0.5, server_speed=4.0, num_devices=3)
    assert made.link == link
    # a pass over r rows takes 0.9 + 0.1 r times 4 ms here
    assert made.passes["a"].at(2) == pytest.approx(4e-3 * (0.9 + 0.1 * 6) / 4)
    assert made.passes["a"].at(32) == pytest.approx(4e-3 * (0.9 + 0.1 * 96) / 4)
    assert made.passes["b"].at(2) == pytest.approx(2 * base.passes["b"].at(2))
    assert made.block_overhead_seconds["a"] == 2 * base.block_overhead_seconds["a"]
    assert made.ngram_seconds == 2 * base.ngram_seconds
    (pair,) = associate(base, fleet_of([["30ms,8Mbit"]]), GRID).pairs.values()
    assert pair.alone_seconds == pytest.approx(base.passes["a"].at(1))
    assert pair.gain == pair.alone_seconds / pair.seconds < 1
    near = associate(base, fleet_of([["0ms"]]), GRID).pairs["d0"]
    assert near.gain > 1
    assert near.tokens_per_block > 1


def test_every_other_server_of_a_device_is_priced_as_one_device_more_there() -> None:
    fleet = fleet_of([["1ms", "50ms"], ["1ms", None], ["50ms", "1ms"]])
    association = associate(measured(), fleet, GRID)
    assert servers_of(association) == ["s0", "s0", "s1"]
    assert {name: set(others) for name, others in association.others.items()} == {
        "d0": {"s1"}, "d1": set(), "d2": {"s0"},
    }  # fmt: skip
    assert association.others["d0"]["s1"].num_devices == 2
    assert association.others["d2"]["s0"].num_devices == 3
    told = association.to_json()
    assert told["sum_of_seconds_per_token"] == told["sum_with_nearest_servers"]
    assert told["devices"]["d2"]["server"] == "s1"


def test_servers_take_no_more_devices_than_they_serve() -> None:
    near = [["1ms", "90ms"]] * 3
    association = associate(measured(), fleet_of(near, s0=1), GRID)
    assert sorted(servers_of(association)) == ["s0", "s1", "s1"]
    assert association.nearest is None
    with pytest.raises(UserError, match="3 devices, 1 at s0, 1 at s1"):
        associate(measured(), fleet_of(near, s0=1, s1=1), GRID)
    with pytest.raises(UserError, match="more devices than the servers serve"):
        associate(measured(), fleet_of([["1ms", None], ["1ms", None]], s0=1), GRID)


def test_more_ways_than_can_be_tried_are_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"too many ways .* 60 devices, 5 servers"):
        associate(measured(), fleet_of([["1ms"] * 5] * 60), GRID)
