"""Which device drafts for which server: the association that makes tokens cheapest in total.

Devices run what is below the target and servers the target, each pair over its own link. A server
that several devices draft for verifies their blocks in shared passes, so what a pair costs depends
on how many others chose the same server (Koh and Yang pose this problem for speculative decoding
between edge devices and base stations). All numbers of devices at each server are tried; for each,
the best pairs are a linear assignment, so the association found is the best of all.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.optimize import linear_sum_assignment

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.settings import Count, Factor, Settings
from polybasic.deploy.planner.measuring.measurements import DraftCosts, Measurements, PassCosts
from polybasic.deploy.planner.search import Candidate, choose_plan
from polybasic.deploy.planner.settings import LinkText, PlanGrid
from polybasic.deploy.planner.simulation import Simulator
from polybasic.deploy.runtime.remote.link import Link

MAX_WAYS = 20_000
"""Ways to divide the devices among the servers by number, each of which is an assignment."""


class FleetServer(Settings):
    """A machine that runs the target."""

    speed: Factor = Field(1.0, description="of its passes, times that of the measuring machine")
    sequences: Count | None = Field(
        None, description="devices that it serves at a time, at most; null: any number"
    )


class Device(Settings):
    """A machine that runs what is below the target."""

    speed: Factor = Field(1.0, description="of its passes, times that of the measuring machine")
    links: dict[str, LinkText] = Field(
        min_length=1,
        description="to each server that it reaches: round trip and bits a second, as in "
        "20ms,100Mbit",
    )


class Fleet(Settings):
    """The devices and servers of an association, as a file names them."""

    servers: dict[str, FleetServer] = Field(min_length=1, description="by name")
    devices: dict[str, Device] = Field(min_length=1, description="by name")

    @model_validator(mode="after")
    def _can_be_associated(self) -> "Fleet":
        for name, device in self.devices.items():
            if unknown := [server for server in device.links if server not in self.servers]:
                known = ", ".join(self.servers)
                raise ValueError(f"{name} has a link to {unknown[0]}; servers are {known}")
        return self

    def most_at(self, server: str) -> int:
        """Devices that a server may have: those that reach it, and no more than it serves."""
        reaching = sum(server in device.links for device in self.devices.values())
        return min(reaching, self.servers[server].sequences or reaching)


@dataclass(frozen=True)
class Pair:
    """A device that drafts for a server, beside others.

    Attributes:
        num_devices: of that server, this one included.
        best: the plan that the device runs by, and its predicted seconds with shared passes.
        alone_seconds: of a token that the server's target gives alone, with as many answers under
            way, and sends: no round trip lies between two of them.
    """

    device: str
    server: str
    link: Link
    num_devices: int
    best: Candidate
    alone_seconds: float

    @property
    def seconds(self) -> float:
        """Of a token."""
        return self.best.seconds_per_token

    @property
    def tokens_per_block(self) -> float:
        """That the server is asked about at a time."""
        return self.best.predicted.rows_per_pass[self.best.plan.members[0]] - 1

    @property
    def gain(self) -> float:
        """Times as fast as the server alone."""
        return self.alone_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """For files and --json."""
        return {
            "server": self.server,
            "link": str(self.link),
            "num_devices": self.num_devices,
            "seconds_per_token": self.seconds,
            "seconds_of_server_alone": self.alone_seconds,
            "gain": self.gain,
            "plan": self.best.plan.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class Association:
    """The servers of all devices.

    Attributes:
        pairs: the chosen ones, by device.
        others: each device at each other server that it reaches, as one device more there.
        nearest: the pairs where each device has the server of its shortest round trip; None where
            a server would have more than it serves.
    """

    pairs: dict[str, Pair]
    others: dict[str, dict[str, Pair]]
    nearest: dict[str, Pair] | None

    def to_json(self) -> dict[str, Any]:
        """For files and --json."""
        return {
            "sum_of_seconds_per_token": total(self.pairs),
            "sum_with_nearest_servers": None if self.nearest is None else total(self.nearest),
            "devices": {device: pair.to_json() for device, pair in self.pairs.items()},
            "others": {
                device: {server: pair.to_json() for server, pair in by_server.items()}
                for device, by_server in self.others.items()
            },
        }


def total(pairs: Mapping[str, Pair]) -> float:
    """Seconds of a token, summed over the devices."""
    return sum(pair.seconds for pair in pairs.values())


def associate(measurements: Measurements, fleet: Fleet, grid: PlanGrid) -> Association:
    """The association with the least sum of predicted seconds a token.

    Args:
        measurements: of a plan over a link, with all members on this machine; whatever link it
            has is replaced.
        grid: of the plans.

    Raises:
        UserError: servers do not serve so many devices, or there are too many ways to divide them.
    """
    pricing = Pricing(measurements, fleet, grid)
    best, chosen = math.inf, None
    for loads in _loads(fleet):
        seats = [server for server, load in loads.items() for _ in range(load)]
        seconds = np.stack([pricing.column(server, loads[server]) for server in seats], axis=1)
        try:
            devices, places = linear_sum_assignment(seconds)
        except ValueError:  # a device reaches no seat
            continue
        if (found := float(seconds[devices, places].sum())) < best:
            best, chosen = found, (loads, [seats[place] for place in places])
    if chosen is None:
        raise UserError(
            "more devices than the servers serve",
            f"{len(fleet.devices)} devices, "
            + ", ".join(f"{fleet.most_at(name)} at {name}" for name in fleet.servers),
            "raise `sequences` of a server, or give a device a link to another one",
        )
    loads, servers = chosen
    pairs = pricing.pairs(dict(zip(fleet.devices, servers, strict=True)))
    others = {
        name: {
            server: pricing.pair(name, server, loads[server] + 1)
            for server in device.links
            if server != pairs[name].server
        }
        for name, device in fleet.devices.items()
    }
    nearest = {
        name: min(device.links, key=lambda server: Link.of(device.links[server]).round_trip_seconds)
        for name, device in fleet.devices.items()
    }
    counts = Counter(nearest.values())
    fits = all(count <= fleet.most_at(server) for server, count in counts.items())
    return Association(pairs, others, pricing.pairs(nearest) if fits else None)


class Pricing:
    """What pairs take, each computed once; arguments as of `associate`."""

    def __init__(self, measurements: Measurements, fleet: Fleet, grid: PlanGrid) -> None:
        self._base = replace(measurements, link=None)
        self._fleet, self._grid = fleet, grid.over_link
        self._simulator = Simulator(self._base)
        self._found: dict[tuple[float, str, str, int], tuple[Candidate, float]] = {}
        self._columns: dict[tuple[str, int], NDArray[np.float64]] = {}

    def pair(self, device: str, server: str, num_devices: int) -> Pair:
        """A device at a server that has so many, itself included."""
        settings = self._fleet.devices[device]
        key = (settings.speed, settings.links[server], server, num_devices)
        link = Link.of(settings.links[server])
        if key not in self._found:
            at_pair = between(
                self._base, link, settings.speed, self._fleet.servers[server].speed, num_devices
            )
            choice = choose_plan([at_pair], self._grid, simulators=[self._simulator])
            self._found[key] = choice.best, at_pair.passes[at_pair.target].at(1)
        return Pair(device, server, link, num_devices, *self._found[key])

    def pairs(self, servers: Mapping[str, str]) -> dict[str, Pair]:
        """Of all devices, by their servers."""
        loads = list(servers.values())
        return {
            device: self.pair(device, server, loads.count(server))
            for device, server in servers.items()
        }

    def column(self, server: str, num_devices: int) -> NDArray[np.float64]:
        """[devices]: seconds a token at a server of so many; infinite where there is no link."""
        if (server, num_devices) not in self._columns:
            self._columns[server, num_devices] = np.array(
                [
                    self.pair(name, server, num_devices).seconds
                    if server in device.links
                    else np.inf
                    for name, device in self._fleet.devices.items()
                ]
            )
        return self._columns[server, num_devices]


def between(
    measurements: Measurements,
    link: Link,
    device_speed: float,
    server_speed: float,
    num_devices: int,
) -> Measurements:
    """What was measured on one machine, as it would be for a device and a server.

    A pass of the server verifies a block of each of its devices: a block of r rows takes what a
    pass over r rows of each takes. That is what a busy server does; one whose devices seldom ask
    at the same time is faster.
    """
    target = measurements.target
    passes = {
        name: PassCosts(costs.rows, tuple(seconds / device_speed for seconds in costs.seconds))
        for name, costs in measurements.passes.items()
    }
    alone = measurements.passes[target]
    shared = (alone.at(num_devices * rows) / server_speed for rows in alone.rows)
    passes[target] = PassCosts(alone.rows, tuple(shared))
    drafts = {
        name: DraftCosts(
            {
                top_k: (first / device_speed, further / device_speed)
                for top_k, (first, further) in costs.by_top_k.items()
            }
        )
        for name, costs in measurements.drafts.items()
    }
    overheads = measurements.block_overhead_seconds
    return replace(
        measurements,
        link=link,
        passes=passes,
        drafts=drafts,
        block_overhead_seconds={
            name: seconds / device_speed for name, seconds in overheads.items()
        },
        ngram_seconds=measurements.ngram_seconds / device_speed,
    )


def _loads(fleet: Fleet) -> Iterator[dict[str, int]]:
    """Every number of devices at each server, so that all have one."""
    ways: list[tuple[int, ...]] = [()]
    left = [fleet.most_at(server) for server in fleet.servers]
    num_devices = len(fleet.devices)
    for place, most in enumerate(left):
        later = sum(left[place + 1 :])
        ways = [
            (*way, load)
            for way in ways
            for load in range(most + 1)
            if 0 <= num_devices - sum(way) - load <= later
        ]
        if len(ways) > MAX_WAYS:
            raise UserError(
                "too many ways to divide the devices among the servers",
                f"{num_devices} devices, {len(left)} servers",
                f"give fewer of them: {MAX_WAYS:,} ways are tried at most",
            )
    for way in ways:
        yield dict(zip(fleet.servers, way, strict=True))
