"""Verbs that are killed or meet a full disk: files under final names are complete and correct.

Killed with SIGKILL before every operation by which files come into being and get their names, and at random moments.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import compressor_files
import numpy as np
import packed_samples
import pytest
from hostile_files import PREFIX
from verb_server import Server, tree

from kvmnn.store import PrefixStore

pytestmark = pytest.mark.slow  # starts and kills processes

TOKENS = 40
COMMANDS = {
    "encode": "encode in/kv.npz -o out/ --chunk-bytes 1K",
    "decode": "decode in/kv -o out.npz",
    "pack": f"mnn pack in/kv.npz -o out/ {PREFIX} --name sys",
    "unpack": "mnn unpack in/sys -o out.npz",
    "repack": "mnn repack in/sys --target-backend arm64-fp16 -o out/",
    "compact": "mnn compact in/sys --remove 7 -o out/",
    "compact over another": "mnn compact in/sys --remove 7 -o in/other -f",
    "measure": "measure in/kv.npz --out-json out.json --out-md out.md",
    "plan": "plan in/scores.npy --input-kind scores --valid-tokens 40 --h2o "
    "block_tokens=2,sink_tokens=2,recent_tokens=4 -o out.json",
    "convert": "compressor convert in/c.pth out.bin",
    "compress-kv": "compressor run in/w.bin in/kv.npz -o out.npz --min-seq-len 1 --axes htd",
    "export": "compressor export in/w.bin -o out.safetensors",
    "export to .npz": "compressor export in/w.bin -o out.npz",
    "store get": "store get in/store --token-ids in/ids.json -o out.npz",
    "store export": "store export in/store --token-ids in/ids.json -o out.text",
}
PUT = "store put in/store in/kv.npz --token-ids in/others.json --fingerprint m"
IMPORT = "store import in/store in/text"
TEXT, OTHERS, MORE = (list(range(first, first + TOKENS)) for first in (100, 0, 200))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, server: Server) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("inputs")
    keys, values = packed_samples.arrays(1, 1, TOKENS, 4)
    np.savez(folder / "kv.npz", **{"layer_0.key": keys, "layer_0.value": values})
    np.save(folder / "scores.npy", np.arange(20, dtype=np.float32))
    compressor_files.checkpoint(folder / "c.pth", compressor_files.weights())
    (folder / "w.bin").write_bytes(compressor_files.weight_file(count=6, head_dim=4, factor=2))
    (folder / "ids.json").write_text(json.dumps(TEXT))
    (folder / "others.json").write_text(json.dumps(OTHERS))
    (folder / "third.json").write_text(json.dumps(OTHERS[::-1]))
    put = f"{folder}/kv.npz --fingerprint m --token-ids"
    for command in (
        f"mnn pack {folder}/kv.npz -o {folder}/sys/ {PREFIX} --name sys",
        f"encode {folder}/kv.npz -o {folder}/kv/",
        f"store put {folder}/store {put} {folder}/ids.json",
        f"store put {folder}/apart {put} {folder}/third.json",
        f"store export {folder}/apart --token-ids {folder}/third.json -o {folder}/text",
    ):
        assert server(command)["code"] == 0
    shutil.rmtree(folder / "apart")
    return tree(folder)


class Place:
    """A folder with the inputs, in which a verb is run."""

    def __init__(self, folder: Path, inputs: dict[str, bytes]) -> None:
        self.folder = folder
        for name, data in inputs.items():
            (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "in" / name).write_bytes(data)
        self.inputs = self.files()

    def command(self, verb: str) -> str:
        words = COMMANDS.get(verb, verb).split()
        return " ".join(str(self.folder / w) if w.startswith(("in/", "out")) else w for w in words)

    def files(self) -> dict[str, bytes]:
        """All files but those of the store, in which uses are noted down."""
        return {name: data for name, data in tree(self.folder).items() if not name.startswith("in/store/")}

    def made(self) -> dict[str, bytes]:
        """What is there under final names; what a killed verb leaves begins with a dot and ends in .tmp."""
        found = self.files()
        return {name: data for name, data in found.items() if not any(part[:1] == "." for part in Path(name).parts)}

    def check_store(self, tokens: int | None = None) -> None:
        """Whatever became of a verb: the store is whole, has its first text, and takes in more."""
        with PrefixStore(self.folder / "in/store") as store:
            assert store.verify().damaged == ()
            found = store.get(TEXT, model="m")
            assert found.tokens == TOKENS and found.notes == ()
            for ids in (OTHERS, OTHERS[::-1]):
                assert store.match(ids, model="m") in ((0, TOKENS) if tokens is None else (tokens,))
            store.put(MORE, found.layers, model="m")
            again = store.get(MORE, model="m")
            assert again.tokens == TOKENS and np.array_equal(again.layers[0].keys, found.layers[0].keys)
        assert list((self.folder / "in/store/staging").iterdir()) == []


@pytest.mark.parametrize("verb", COMMANDS)
def test_killed_verb_leaves_complete_outputs(
    verb: str, server: Server, inputs: dict[str, bytes], tmp_path: Path
) -> None:
    whole = Place(tmp_path / "whole", inputs)
    answer = server(whole.command(verb))
    assert answer["code"] == 0, answer["errors"]
    expected, moments = whole.made(), answer["moments"]
    assert moments > 0 and expected != whole.inputs
    rng = Random(verb)
    step = 1 if os.environ.get("KVMNN_ATTACKS") else 4  # make attack takes every moment
    ways = [{"die_at": moment + 1} for moment in range(0, moments, step)]
    ways += [{"after": rng.random() / 10} for _ in range(3)]
    for number, way in enumerate(ways):
        place = Place(tmp_path / str(number), inputs)
        answer = server(place.command(verb), **way)
        assert answer["code"] == -9 or ("after" in way and answer["code"] == 0), answer
        made = place.made()
        for name, data in made.items():
            assert settled(data) in {settled(expected.get(name, b"")), place.inputs.get(name)}, (way, name)
        assert place.inputs.keys() <= made.keys() or verb == "compact over another", way
        again = server(place.command(verb) + ("" if " -f" in COMMANDS[verb] else " -f"))
        if verb != "compact over another":
            assert again["code"] == 0, again["errors"]
            assert place.made().keys() == expected.keys()


def settled(data: bytes) -> bytes:
    """Without what differs from run to run: folders and seconds in the documents of measure."""
    return re.sub(rb"[\w/.-]*/in/|\b\d+\.\d+(e-\d+)?\b", b"", data)


LIMITS = (0, 1, 64, 300)
DISK = [verb for verb in COMMANDS if verb not in ("encode", "decode")]


@pytest.mark.parametrize("verb", DISK)
def test_file_size_limit_leaves_complete_outputs(
    verb: str, server: Server, inputs: dict[str, bytes], tmp_path: Path
) -> None:
    for limit in LIMITS:
        place = Place(tmp_path / str(limit), inputs)
        answer = server(place.command(verb), bytes=limit)
        if answer["code"] == 0 and limit > 1:
            assert all(len(data) <= limit for name, data in place.made().items() if name not in place.inputs)
        else:
            check_refused(answer, place)


@pytest.mark.parametrize("verb", DISK)
def test_full_disk_leaves_complete_outputs(verb: str, server: Server, inputs: dict[str, bytes], tmp_path: Path) -> None:
    """The file system has one page, or no inode, in addition to the inputs."""
    pages = sum(-(-len(data) // 4096) for data in inputs.values())
    for options in (f"size={4096 * (pages + 4)},nr_inodes=1000", f"size=1M,nr_inodes={len(inputs) + 12}"):
        disk = tmp_path / "disk"
        disk.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("needs to mount a small tmpfs")
        try:
            place = Place(disk, inputs)
            filler = disk / "filler"
            with filler.open("wb") as file:
                written = 0
                try:
                    while written < 1 << 20 and "inodes=1000" in options:
                        written += os.write(file.fileno(), bytes(4096))
                except OSError:
                    pass
            place.inputs["filler"] = filler.read_bytes()
            number = 0
            try:
                while "size=1M" in options:
                    (disk / f"more{number}").touch()
                    place.inputs[f"more{number}"] = b""
                    number += 1
            except OSError:
                pass
            check_refused(server(place.command(verb)), place)
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def check_refused(answer: dict[str, object], place: Place) -> None:
    """One line of error, after a warning of a store that can still be read, and everything as it was."""
    *warnings, error = str(answer["errors"]).splitlines()
    assert answer["code"] == 1, answer
    assert error.startswith("kvmnn: error: "), answer
    assert all(re.match("kvmnn: warning: .*: nothing can be stored$", line) for line in warnings), answer
    assert place.files() == place.inputs


@pytest.mark.parametrize("verb", [PUT, IMPORT], ids=["put", "import"])
def test_killed_store_writer_leaves_readable_store(
    verb: str, server: Server, inputs: dict[str, bytes], tmp_path: Path
) -> None:
    whole = Place(tmp_path / "whole", inputs)
    answer = server(whole.command(verb))
    assert answer["code"] == 0, answer["errors"]
    assert answer["moments"] > 3
    rng = Random(verb)
    ways = [{"die_at": moment + 1} for moment in range(answer["moments"])] + [{"after": rng.random() / 10}] * 2
    for number, way in enumerate(ways):
        place = Place(tmp_path / str(number), inputs)
        answer = server(place.command(verb), **way)
        assert answer["code"] == -9 or ("after" in way and answer["code"] == 0), answer
        place.check_store()


@pytest.mark.parametrize("verb", [PUT, IMPORT], ids=["put", "import"])
def test_store_file_size_limit_is_reported(verb: str, server: Server, inputs: dict[str, bytes], tmp_path: Path) -> None:
    for limit in (0, 64, 300, 4096):
        place = Place(tmp_path / str(limit), inputs)
        check_refused(server(place.command(verb), bytes=limit), place)
        place.check_store(tokens=0)


def test_full_device_is_reported(server: Server, inputs: dict[str, bytes], tmp_path: Path) -> None:
    place = Place(tmp_path, inputs)
    for command in (
        "compressor convert in/c.pth /dev/full",
        "plan in/scores.npy --input-kind scores --valid-tokens 40 --h2o block_tokens=2 -o /dev/full",
    ):
        words = " ".join(str(tmp_path / w) if w.startswith("in/") else w for w in command.split())
        answer = server(words)
        assert answer["code"] == 1 and "No space left on device" in answer["errors"], answer
        check_refused(answer, place)
