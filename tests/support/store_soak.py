"""A prefix store under processes that use it at once, and are killed: ``python tests/support/store_soak.py --help``."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from prefixes import MODEL, layers_of, same

from kvmnn.store import PrefixStore, StoreStats, load_key
from kvmnn.store.backend import STORE_POLICIES, compute_benefit

BLOCK = 4
TENANTS = (None, "a", "b")
QUOTA = 30_000  # of "a" and "b"


def text(chance: random.Random) -> list[int]:
    """A text that begins as many others do."""
    return [chance.choice((7, 7, 7, chance.randrange(3))) for _ in range(chance.randrange(1, 70))]


def work(folder: Path, seed: int, seconds: float, max_bytes: int) -> int:
    """Put, get, delete and clean at random for a while; how many gets found something. Fails for wrong rows.

    It goes on until a get finds something, half a minute longer at most: on a loaded machine a second has no round.
    """
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    found = 0

    def is_over() -> bool:
        return time.monotonic() >= (end if found else end + 30)

    print("begins", flush=True)
    while not is_over():
        tenant = chance.choice(TENANTS)
        rows = {"seed": (tenant or "").encode()}  # other rows of the same text in each namespace
        bounds = {"max_bytes": max_bytes, "quota": QUOTA if tenant else None}
        with PrefixStore(folder, block_tokens=BLOCK, threads=1, namespace=tenant, key=load_key(), **bounds) as store:
            for _ in range(50):
                ids = text(chance)
                action = chance.random()
                if action < 0.45:
                    store.put(ids, layers_of(ids, **rows), model=MODEL)
                elif action < 0.97:
                    got = store.get(ids, model=MODEL)
                    assert got.notes == (), got.notes
                    assert got.tokens == 0 or same(got.layers, ids, got.tokens, **rows)
                    found += got.tokens > 0
                elif action < 0.98:
                    store.gc()
                elif store.match(ids, model=MODEL) == len(ids):
                    try:
                        store.delete(ids, model=MODEL)
                    except ValueError as error:  # another process was faster
                        assert "holds" in str(error), error
                if is_over():
                    break
    return found


def start(folder: Path, seed: int, seconds: float, max_bytes: int) -> subprocess.Popen[bytes]:
    """`work` in a process."""
    places = os.pathsep.join(path for path in sys.path if path)
    arguments = [str(folder), str(seed), str(seconds), str(max_bytes)]
    return subprocess.Popen(
        [sys.executable, "-P", __file__, "work", *arguments],
        env={**os.environ, "PYTHONPATH": places},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def together(folder: Path, processes: int, seconds: float, policy: str = "lru") -> list[int]:
    """Processes at once, the making of the store included; how many gets of each found something."""
    if policy != "lru":
        PrefixStore(folder, block_tokens=BLOCK, policy=policy, key=load_key()).close()
    running = [start(folder, seed, seconds, 60_000) for seed in range(processes)]
    found = []
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err.decode()[-2000:]
        found.append(int(out.split()[-1]))
    check(folder)
    return found


def killed(folder: Path, times: int, seed: int = 1, policy: str = "lru") -> None:
    """Processes that are killed at random moments; after each everything that is found decodes to what was put."""
    if policy != "lru":
        PrefixStore(folder, block_tokens=BLOCK, policy=policy, key=load_key()).close()
    chance = random.Random(seed)
    for number in range(times):
        processes = [start(folder, seed * 1000 + number * 2 + each, 30, 60_000) for each in range(2)]
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"begins\n"
        time.sleep(chance.random() * 0.3)
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        if (folder / "index.sqlite").exists():
            check(folder)


def check(folder: Path) -> None:
    """Nothing is damaged or lost, the index is consistent, and cleaning leaves what is referred to and nothing else."""
    with PrefixStore(folder, block_tokens=BLOCK, key=load_key()) as store:
        verified = store.verify()
        assert verified.damaged == (), verified
        cleaned = store.gc()
        assert cleaned.units == 0, cleaned
        check_priorities(store)
        all_stats = [count(folder, tenant) for tenant in TENANTS]
        files = list(folder.glob("units/*/*.unit"))
        assert len(files) == sum(stats.units for stats in all_stats)
        assert sum(file.stat().st_size for file in files) == sum(stats.bytes for stats in all_stats)
        assert not list(folder.glob("staging/.*"))
        store.gc(max_bytes=0)
        assert not any(count(folder, tenant).units for tenant in TENANTS), (
            "counts of children are wrong: something cannot be evicted"
        )


def check_priorities(store: PrefixStore) -> None:
    """Each unit has a priority that its uses allow, and none is above all that the clock and its uses can give."""
    (path,) = Path(store._backend.label).glob("index*.sqlite")
    with closing(sqlite3.connect(path)) as index:
        (clock,) = index.execute("SELECT clock FROM state").fetchone()
        for used, tokens, nbytes, uses, priority in index.execute(
            "SELECT used, tokens, bytes, uses, priority FROM unit"
        ).fetchall():
            benefit = uses * compute_benefit(tokens, nbytes)
            is_valid = priority == used if store.policy == "lru" else benefit <= priority <= clock + benefit
            assert uses >= 1 and is_valid, (used, tokens, nbytes, uses, priority, clock)


def count(folder: Path, tenant: str | None) -> StoreStats:
    """What a namespace has."""
    with PrefixStore(folder, read_only=True, namespace=tenant, key=load_key()) as store:
        return store.stats()


def main() -> None:
    """Run it for long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--policy", choices=STORE_POLICIES, default="lru")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = together(Path(folder, "together"), arguments.processes, arguments.seconds, arguments.policy)
        print(f"{arguments.processes} processes for {arguments.seconds:g} s: {sum(found):,} gets found something")
        killed(Path(folder, "killed"), arguments.kills, policy=arguments.policy)
        print(f"{arguments.kills} kills: everything that was found decoded to what was put")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        print(work(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
    else:
        main()
