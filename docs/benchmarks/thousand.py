"""What a thousand devices of replicas need, by simulation of their queue: python docs/benchmarks/thousand.py

Requests arrive at random (Poisson), in a mix of kinds, and each replica draws one at a time. Compared are
ways to choose the replica, sizes of a replica, and loads; then the time to bring weights to all hosts. Times
of service are those of one device, in seconds; replicas of several are quicker by the gains that are
given. Prints tables in Markdown. Nothing here is measured but what it is given.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import numpy as np

# kind -> (share of requests, seconds on one device): H3-Image in BF16 on one H200, prompt to PNG (h200.md)
KINDS = {"2048x2048": (0.7, 1.92), "4096x4096": (0.3, 9.76)}
GAINS = {1: 1.0, 2: 1.85, 4: 3.4, 8: 5.8}  # of the device count on one request
REQUESTS = 200_000
HOST_DEVICES = 8

Choose = Callable[[np.ndarray, float, np.random.Generator], int]


def by_turns(free: np.ndarray, now: float, rng: np.random.Generator) -> int:
    by_turns.last = (getattr(by_turns, "last", -1) + 1) % len(free)
    return int(by_turns.last)


def at_random(free: np.ndarray, now: float, rng: np.random.Generator) -> int:
    return int(rng.integers(len(free)))


def better_of_two(free: np.ndarray, now: float, rng: np.random.Generator) -> int:
    one, other = rng.integers(len(free), size=2)
    return int(one if free[one] <= free[other] else other)


def least_work(free: np.ndarray, now: float, rng: np.random.Generator) -> int:
    return int(free.argmin())


POLICIES: dict[str, Choose] = {
    "at random": at_random,
    "by turns": by_turns,
    "the better of two": better_of_two,
    "the one with the least work, or one queue for all": least_work,
}


def simulate(replicas: int, gain: float, load: float, choose: Choose, *, seed: int = 0) -> np.ndarray:
    """Seconds from arrival to the picture, for each request after a warm-up."""
    rng = np.random.default_rng(seed)
    shares, seconds = zip(*KINDS.values(), strict=True)
    service = rng.choice(seconds, size=REQUESTS, p=shares) / gain
    rate = load * replicas / (np.dot(shares, seconds) / gain)
    arrivals = np.cumsum(rng.exponential(1 / rate, REQUESTS))
    free = np.zeros(replicas)
    took = np.empty(REQUESTS)
    for number, (now, work) in enumerate(zip(arrivals, service, strict=True)):
        chosen = choose(free, now, rng)
        free[chosen] = max(free[chosen], now) + work
        took[number] = free[chosen] - now
    return took[REQUESTS // 5 :]


def row(label: str, took: np.ndarray) -> str:
    middle, late, latest = np.percentile(took, [50, 95, 99])
    return f"| {label} | {took.mean():.1f} | {middle:.1f} | {late:.1f} | {latest:.1f} |"


def tables(devices: int) -> Sequence[str]:
    head = "| | mean | median | p95 | p99 |\n| --- | --- | --- | --- | --- |"
    lines = [f"Choosing a replica, {devices} of one device, load 0.85; seconds:\n", head]
    lines += [row(name, simulate(devices, 1.0, 0.85, choose)) for name, choose in POLICIES.items()]
    lines += ["\nDevices of a replica, least work, by load:\n", head]
    for size, gain in GAINS.items():
        for load in (0.6, 0.85):
            # The same arrivals for all sizes: the load of the devices grows as their gain falls short.
            own = load * size / gain
            label = f"{devices // size} replicas of {size}, arrivals for {load:.0%} of single devices"
            if own >= 1:
                lines.append(f"| {label} | cannot keep up: {own:.0%} | | | |")
            else:
                lines.append(row(label, simulate(devices // size, gain, own, least_work)))
    lines += ["\nLoad, the least work, replicas of one:\n", head]
    lines += [row(f"{load:.0%}", simulate(devices, 1.0, load, least_work)) for load in (0.7, 0.9, 0.97, 0.99)]
    return lines


def weight_minutes(gigabytes: float, hosts: int, store: float, link: float) -> Sequence[str]:
    """Minutes until all hosts have the weights: from one store, or handed on from host to host.

    store, link: gigabytes per second out of the store in all, and between two hosts.
    """
    from_store = hosts * gigabytes / store / 60
    # The store feeds as many as its links allow, and each host feeds one that has nothing yet.
    rounds = math.ceil(math.log2(hosts / max(store // link, 1) + 1))
    handed_on = rounds * gigabytes / link / 60
    return [
        f"\nWeights of {gigabytes:g} GB to {hosts} hosts: {from_store:.1f} minutes from one store that gives "
        f"{store:g} GB/s in all, {handed_on:.1f} minutes handed on at {link:g} GB/s in {rounds} rounds."
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--gigabytes", type=float, default=135.0, help="of one checkpoint on disk")
    options = parser.parse_args()
    hosts = options.devices // HOST_DEVICES
    print("\n".join([*tables(options.devices), *weight_minutes(options.gigabytes, hosts, 12.5, 12.5)]))


if __name__ == "__main__":
    main()
