"""``kvmnn store``: its output, its exit codes, and refused options without effect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from prefixes import layers_of
from repository import FIXTURES

import kvmnn
from kvmnn.formats.mnn import compute_fingerprint

IDS = [*range(100, 150)]
NO_ROOM = "the size limit (max_bytes, --size-limit) has no room for more: at least {} bytes are needed, 100 are allowed"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Texts of 50 and 30 tokens, the second the beginning of the first; their K and V as arrays."""
    monkeypatch.chdir(tmp_path)
    for name, ids in (("long", IDS), ("short", IDS[:30]), ("other", [1, 2, 3])):
        Path(f"{name}.json").write_text(json.dumps(ids))
        np.savez(f"{name}.npz", **arrays(ids))
    np.save("long_ids.npy", np.array(IDS))
    Path("long.txt").write_text(" ".join(map(str, IDS)))
    return tmp_path


def arrays(ids: list[int]) -> dict[str, np.ndarray]:
    return {
        f"layer_{cache.layer}.{part}": words
        for cache in layers_of(ids)
        for part, words in (("key", cache.keys), ("value", cache.values))
    }


def test_store_put_of_a_model_without_k_and_v_in_some_layers(here: Path, run) -> None:
    """Numbers alone do not show whether a layer was lost or never had K and V: who puts it says so, once."""
    last = 1 + max(cache.layer for cache in layers_of(IDS))
    values = arrays(IDS)
    more = {name.replace("layer_0", f"layer_{last + 1}"): words for name, words in values.items() if "layer_0" in name}
    np.savez("nas.npz", **values, **more)
    words = ("store", "put", "S", "nas.npz", "--token-ids", "long.json", "--fingerprint", "m")
    problem = f"layer {last} is missing before layer {last + 1}"
    refused = run(*words, code=1).err
    assert f"{problem} (if the model has no K and V there: --ignore contradictions, in Python" in refused
    assert not Path("S").exists()
    put_text = run(*words, "--ignore", "contradictions").out
    assert put_text.startswith("50 tokens, 50 of them new") and f"\n  incomplete: {problem}\n" in put_text
    got = run("store", "get", "S", "--token-ids", "long.json", "--fingerprint", "m", "-o", "back.npz").out
    assert got.endswith(f"\n  incomplete: {problem}\n")
    assert {name: words.tobytes() for name, words in np.load("back.npz").items()} == {
        name: words.tobytes() for name, words in {**values, **more}.items()
    }
    del values["layer_0.value"]  # of a layer that is there nothing may be missing
    np.savez("nas.npz", **values, **more)
    words = (*words[:2], "T", *words[3:])
    assert "layer 0 has K and no V" in run(*words, "--ignore", "contradictions", code=1).err


def test_store_put_match_get(here: Path, run) -> None:
    said = run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m").out
    assert said.startswith("50 tokens, 50 of them new: 3,200 -> ")
    for ids in ("long.json", "long_ids.npy", "long.txt"):
        assert run("store", "match", "S", "--token-ids", ids).out == "50\n"
    assert run("store", "match", "S", "--token-ids", "other.json", code=1).out == "0\n"
    assert json.loads(run("store", "match", "S", "--token-ids", "short.json", "--json").out) == {
        "verb": "store match",
        "tokens": 30,
        "asked": 30,
        "dtype": "fp16",
        "others": {},
        "notes": [],
        "outage": False,
    }
    said = run("store", "get", "S", "--token-ids", "short.json", "-o", "back.npz").out
    assert said.startswith("30 of 30 tokens, fp16: all of the text\nback.npz: 4 arrays, 1,920 bytes, LOSSLESS")
    with np.load("back.npz") as back:
        wanted = arrays(IDS[:30])
        assert sorted(back) == sorted(wanted)
        assert all(np.array_equal(back[name], wanted[name]) for name in wanted)
    said = run("store", "put", "S", "short.npz", "--token-ids", "short.json", "--fingerprint", "m").out
    assert said == "30 tokens: all of them were stored already\n"
    error = run("store", "get", "S", "--token-ids", "other.json", "-o", "none.npz", code=1).err
    assert "S: nothing of this text of 3 tokens is stored under this model" in error
    assert not Path("none.npz").exists()


@pytest.mark.parametrize("action", ["match", "get"])
def test_store_json_of_an_outage_says_so(here: Path, run, action: str) -> None:
    pytest.importorskip("redis")
    output = ("-o", "back.npz") if action == "get" else ()
    options = ("--token-ids", "short.json", "--fingerprint", "m", "--json")
    document = json.loads(run("store", action, "redis://127.0.0.1:1/0", *options, *output, code=1).out)
    assert (document["verb"], document["outage"]) == (f"store {action}", True)
    assert "does not answer" in document["error"] and not Path("back.npz").exists()


def test_store_put_beyond_size_limit_is_noted(here: Path, run) -> None:
    put = ("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    refused = run(*put, "--size-limit", "100", code=1)
    assert refused.out.startswith(f"50 tokens: nothing was stored: {NO_ROOM.partition('{}')[0]}") and refused.err == ""
    document = json.loads(run(*put, "--size-limit", "100", "--json", code=1).out)
    (note,) = document["notes"]
    assert document["stored_tokens"] == 0 and refused.out.endswith(f"{note}\n")
    assert "quota (quota, --quota)" in run(*put, "--namespace", "a", "--quota", "100", code=1).out
    stored = json.loads(run(*put, "--size-limit", "1M", "--json").out)
    assert note == NO_ROOM.format(f"{stored['stored_bytes']:,}")
    missed = json.loads(run("store", "match", "S", "--token-ids", "1,2,3", "--json", code=1).out)
    assert (document["error"], missed["error"], missed["tokens"]) == (note, "nothing of this text is stored", 0)
    assert "error" not in stored
    evicted = run(*put, "--size-limit", "100", code=1)
    assert evicted.out.startswith("50 tokens: none of them is stored now: ")
    assert evicted.out.endswith(" bytes of files evicted or replaced\n")
    assert run("store", "match", "S", "--token-ids", "long.json", code=1).out == "0\n"


def test_store_put_partial_text_fails_again(here: Path, run) -> None:
    ids = list(range(600))
    np.savez("big.npz", **arrays(ids))
    Path("big.json").write_text(json.dumps(ids))
    options = ("big.npz", "--token-ids", "big.json", "--fingerprint", "m", "--json")
    run("store", "put", "whole", *options)
    first_unit, _ = sorted(Path("whole").glob("units/*/*"))
    limit = ("--size-limit", str(first_unit.stat().st_size))
    for known_tokens in (0, 512):
        document = json.loads(run("store", "put", "S", *options, *limit, code=1).out)
        assert (document["known_tokens"], document["stored_tokens"]) == (known_tokens, 512)
        assert document["error"] == document["notes"][0]
    assert run("store", "match", "S", "--token-ids", "big.json").out == "512\n"


def test_store_get_notes_the_dtype_it_used(here: Path, run) -> None:
    """50 tokens are stored in fp16, 30 of them in fp32 as well."""
    wide = {name: words.astype(np.float32) for name, words in arrays(IDS[:30]).items()}
    np.savez("wide.npz", **wide)
    for cache, ids in (("long.npz", "long.json"), ("wide.npz", "short.json")):
        run("store", "put", "S", cache, "--token-ids", ids, "--fingerprint", "m")
    note = "note: taken in fp16, which has 50 tokens; stored as well: 30 in fp32 (--dtype)\n"
    said = run("store", "match", "S", "--token-ids", "long.json")
    assert said.out == "50\n" and said.err.endswith(note)
    said = run("store", "match", "S", "--token-ids", "long.json", "--json")
    document = json.loads(said.out)
    assert (document["tokens"], document["dtype"], document["others"]) == (50, "fp16", {"fp32": 30})
    said = run("store", "match", "S", "--token-ids", "long.json", "--dtype", "fp32")
    assert (said.out, said.err) == ("30\n", "")
    said = run("store", "get", "S", "--token-ids", "long.json", "-o", "back.npz")
    assert said.out.startswith("50 of 50 tokens, fp16: ") and said.err.endswith(note)
    (line,) = (line for line in run("store", "ls", "S").out.splitlines() if " fp16 " in line)
    for action in (["match"], ["get", "-o", "none.npz"], ["export", "-o", "none.kv"], ["rm"], ["pin"], ["stat"]):
        refused = run("store", action[0], "S", line.split()[0], *action[1:], "--dtype", "fp32", code=2)
        assert "is a text in fp16, not in fp32: leave --dtype out" in refused.err
    assert not Path("none.npz").exists() and not Path("none.kv").exists()
    assert run("store", "match", "S", line.split()[0], "--dtype", "fp16").out == "50\n"
    said = run(
        "store", "get", "S", "--token-ids", "long.json", "-o", "back.npz", "--dtype", "fp32", "--json", "--force"
    )
    document = json.loads(said.out)
    assert (document["tokens"], document["dtype"], document["others"]) == (30, "fp32", {})
    with np.load("back.npz") as back:
        assert all(back[name].dtype == np.float32 and np.array_equal(back[name], wide[name]) for name in wide)
    assert json.loads(run("store", "match", "S", "--token-ids", "other.json", "--json", code=1).out)["dtype"] is None
    np.savez("narrow.npz", **arrays(IDS[:30]))
    run("store", "put", "T", "wide.npz", "--token-ids", "short.json", "--fingerprint", "m")
    run("store", "put", "T", "narrow.npz", "--token-ids", "short.json", "--fingerprint", "m")
    said = run("store", "export", "T", "--token-ids", "short.json", "-o", "one.file")
    assert said.err == "kvmnn: note: taken in fp32, which has 30 tokens; stored as well: 30 in fp16 (--dtype)\n"
    assert run("store", "pin", "T", "--token-ids", "short.json").out == "30 tokens in fp32 and fp16: pinned\n"
    assert run("store", "unpin", "T", "--token-ids", "short.json", "--dtype", "fp16").out == "30 tokens: unpinned\n"
    assert run("store", "unpin", "T", "--token-ids", "short.json").out == "30 tokens: unpinned\n"
    assert " in fp32 and fp16" in run("store", "rm", "T", "--token-ids", "short.json").out
    assert run("store", "ls", "T").out == "no texts\n"


def test_store_get_of_another_dtype(here: Path, run) -> None:
    """A miss names the stored dtype; a backend uses its own, or names the option that converts."""
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    ids = ("--token-ids", "long.json")
    note = "kvmnn: note: nothing is stored in fp32; 50 tokens are in fp16 (--dtype)\n"
    assert run("store", "match", "S", *ids, "--dtype", "fp32", code=1).err == note
    assert note in run("store", "get", "S", *ids, "--dtype", "fp32", "-o", "x.npz", code=1).err
    packed = ("--backend", "x86-avx2", "--name", "p", "-o", "p/")
    said = run("store", "get", "S", *ids, *packed, code=2).err
    assert "the arrays are fp16, the layout holds fp32: --cast (cast=True) converts them" in said
    np.savez("wide.npz", **{name: words.astype(np.float32) for name, words in arrays(IDS[:30]).items()})
    run("store", "put", "S", "wide.npz", "--token-ids", "short.json", "--fingerprint", "m")
    made = run("store", "get", "S", *ids, *packed)
    assert made.out.startswith("30 of 50 tokens, fp32: ")
    assert made.err == "kvmnn: note: taken in fp32, which x86-avx2 holds; 50 tokens are in fp16\n"


def test_store_get_as_prefix_cache_round_trips(here: Path, run) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    more = ["--backend", "arm64-fp16", "--name", "sys", "--capacity", "64"]
    document = json.loads(run("store", "get", "S", "--token-ids", "long.json", *more, "-o", "sys/", "--json").out)
    assert (document["tokens"], document["asked"], document["label"]) == (50, 50, "LOSSLESS")
    assert document["cache"]["token_ids"]["count"] == 50
    run("store", "put", "T", "sys/", "--token-ids", "long.json", "--fingerprint", "m")
    run("store", "get", "T", "--token-ids", "long.json", "-o", "again.npz")
    run("diff", "again.npz", "long.npz")


def test_store_put_prefix_cache_with_fewer_ids_is_refused(here: Path, run) -> None:
    """--valid-tokens selects a beginning."""
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    layout = ["--backend", "arm64-fp16"]
    run("store", "get", "S", "--token-ids", "long.json", *layout, "--name", "sys", "-o", "sys/")
    for document in Path("sys").glob("*.json"):
        document.unlink()  # as an engine writes it
    put = ["store", "put", "T", "sys/", "--fingerprint", "m", *layout, "--kv-heads", "2", "--head-dim", "4"]
    error = run(*put, "--token-ids", "100,101,102", code=2).err
    assert "sys/: 3 token ids, but in 2 of 2 layers rows after the 3 tokens are not zero, up to row 50" in error
    assert "say --valid-tokens 3 as well if only these tokens are meant" in error and not Path("T").exists()
    found = run(*put, "--token-ids", "100,101,102", "--valid-tokens", "3")
    assert (
        found.out.startswith("3 tokens, 3 of them new")
        and "more tokens may be live than --valid-tokens says" in found.err
    )
    assert run(*put, "--token-ids", "long.json").out.startswith("50 tokens, 47 of them new")
    run("store", "get", "T", "--token-ids", "long.json", "-o", "again.npz")
    run("diff", "again.npz", "long.npz")


def test_store_put_wrong_token_count_is_refused(here: Path, run) -> None:
    error = run("store", "put", "S", "long.npz", "--token-ids", "short.json", "--fingerprint", "m", code=2).err
    assert "long.npz: layer 0 holds 50 tokens, there are 30 token ids" in error
    assert not Path("S").exists()


def test_store_fingerprint_includes_engine_settings(here: Path, run) -> None:
    Path("llm.mnn").write_bytes(b"graph")
    put = ["store", "put", "S", "short.npz", "--token-ids", "short.json", "--rope", "none", "--model", "."]
    run(*put, "--fingerprint", "memory=low")
    digits = compute_fingerprint(".")[:16]
    assert f"the model {digits} memory=low, these are of {digits} (--force" in run(*put, code=2).err
    run(*put, "--force")
    assert run("store", "stat", "S").out.count(compute_fingerprint(".")) == 2
    *lines, _ = run("store", "ls", "S").out.splitlines()
    assert [line.split("fp16  ")[1].split("  ")[0] for line in lines] == [digits, f"{digits} memory=low"]
    match = ["store", "match", "S", "--token-ids", "short.json", "--model", "."]
    assert run(*match, "--fingerprint", "memory=low").out == "30\n"
    assert "2 models" in run(*match, "--fingerprint", "memory=high", code=1).err


def test_store_put_of_another_model_is_refused(here: Path, run) -> None:
    put = ["store", "put", "S", "short.npz", "--token-ids", "short.json"]
    assert "does not say which model computed it: --model or --fingerprint says it" in run(*put, code=2).err
    assert "model is '': expected a fingerprint of 1 to 256" in run(*put, "--fingerprint", "", code=1).err
    run(*put, "--fingerprint", "one")
    error = run(*put, "--fingerprint", "two", code=2).err
    assert "S: holds prefixes of the model one, these are of two (--force puts them as well)" in error
    match = ["store", "match", "S", "--token-ids", "short.json"]
    assert "S: holds prefixes of the model one, not of two" in run(*match, "--fingerprint", "two", code=1).err
    run(*put, "--fingerprint", "two", "--force")
    assert "holds prefixes of 2 models: --model or --fingerprint says which" in run(*match, code=2).err
    assert run(*match, "--fingerprint", "two").out == "30\n"
    said = "S: holds prefixes of 2 models (one, two), not of three"
    assert said in run(*match, "--fingerprint", "three", code=1).err


def test_store_stat_ls_pin_rm_gc_export_import(here: Path, run) -> None:
    for name in ("short", "long"):
        run("store", "put", "S", f"{name}.npz", "--token-ids", f"{name}.json", "--fingerprint", "m", "-q")
    assert json.loads(run("store", "stat", "S", "--json").out)["tokens"] == 50
    assert "asked_tokens" not in json.loads(run("store", "stat", "S", "--json").out)
    assert run("store", "stat", "S").out.startswith("1 text: 1 unit, 0 whole blocks, 50 tokens\n")
    assert "fp16  m  0 uses ago" in run("store", "ls", "S").out
    assert json.loads(run("store", "ls", "S", "--json").out)["texts"][0]["tokens"] == 50
    assert run("store", "pin", "S", "--token-ids", "long.json").out == "50 tokens: pinned\n"
    assert run("store", "pin", "S", "--token-ids", "long.json").out == "50 tokens: pinned as before\n"
    assert "the text is pinned" in run("store", "rm", "S", "--token-ids", "long.json", code=1).err
    assert "above the limit, of texts that are pinned" in run("store", "gc", "S", "--size-limit", "9", code=1).out
    document = json.loads(run("store", "gc", "S", "--size-limit", "9", "--json", code=1).out)
    assert document["error"] == document["kept"] and document["excess_bytes"] > 0
    assert run("store", "unpin", "S", "--token-ids", "long.json").out == "50 tokens: unpinned\n"
    run("store", "export", "S", "--token-ids", "long.json", "-o", "long.prefix")
    run("store", "import", "T", "long.prefix", "--size-limit", "1M")
    assert run("store", "match", "T", "--token-ids", "long.json").out == "50\n"
    assert "LOSSLESS (all of it decoded and compared" in run("store", "verify", "T").out
    assert json.loads(run("store", "verify", "T", "--json").out)["label"] == "LOSSLESS"
    (file,) = Path("T/units").glob("*/*.unit")
    file.write_bytes(file.read_bytes()[:-1])
    assert run("store", "verify", "T", code=1).out.startswith("1 unit damaged:")
    (space,) = Path("T/spaces").iterdir()
    space.write_bytes(b"?")
    document = json.loads(run("store", "verify", "T", "--json", code=1).out)
    assert (document["damaged"], document["damaged_files"]) == ([], [f"{space}: is lost or damaged: written again"])
    assert run("store", "rm", "S", "--token-ids", "long.json").out.startswith("removed 1 unit, ")
    assert run("store", "gc", "S", "--size-limit", "0").out.startswith("removed ")
    assert run("store", "ls", "S").out == "no texts\n"


def test_store_import_second_model_needs_force(here: Path, run) -> None:
    for store, name, model in (("S", "long", "one"), ("T", "other", "two")):
        run("store", "put", store, f"{name}.npz", "--token-ids", f"{name}.json", "--fingerprint", model)
    run("store", "export", "T", "--token-ids", "other.json", "-o", "two.prefix")
    refusal = run("store", "import", "S", "two.prefix", code=2).err
    assert "S: holds prefixes of the model one, these are of two (--force puts them as well)" in refusal
    assert json.loads(run("store", "stat", "S", "--json").out)["models"] == ["one"]
    assert run("store", "import", "S", "two.prefix", "--force").out.startswith("3 tokens, 3 of them new")
    assert run("store", "import", "S", "two.prefix").out.startswith("3 tokens: all of them were stored already")


def test_store_get_miss_differs_from_an_error_by_json(here: Path, run) -> None:
    """Both exit with 1."""
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    for action in (["match"], ["get", "-o", "back.npz"]):
        name, *options = action
        miss = json.loads(run("store", name, "S", "--token-ids", "other.json", *options, "--json", code=1).out)
        assert miss["tokens"] == 0
        for argv in (
            ["missing", "--token-ids", "other.json"],
            ["S", "--token-ids", "missing.json"],
            ["S", "--token-ids", "other.json", "--key-file", "missing.key"],
            ["S", "label"],
            ["redis://127.0.0.1:1/0", "--token-ids", "other.json"],
        ):
            document = json.loads(run("store", name, *argv, *options, "--json", code=1).out)
            assert "tokens" not in document and document["error"]


def test_store_put_that_fails_first_leaves_no_store(here: Path, run) -> None:
    """Else the next put, of another codec, would be refused."""
    import transform_samples

    from kvmnn.dense.rope import RopeConfig

    transform_samples.create_profile(transform_samples.create_geometries(2, 2, 8, 8, RopeConfig(1e4, 8))).write(
        "p.kvmp"
    )
    put = ("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    assert "layer" in run(*put, "--codec", "transform:p.kvmp", code=1).err and not Path("S").exists()
    run(*put, "--size-limit", "10", code=1)
    assert not Path("S").exists()
    run(*put, "--codec", "mnn")
    run("store", "rm", "S", "--token-ids", "long.json")
    assert "is a store of frames" in run(*put, "--codec", "dense", code=2).err, "a store that had texts is kept"


def test_store_verify_dry_run_removes_no_damage(here: Path, run) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    (file,) = Path("S/units").glob("*/*.unit")
    file.write_bytes(file.read_bytes()[:-1])
    (space,) = Path("S/spaces").iterdir()
    space.write_bytes(b"?")
    for _ in range(2):
        shown = run("store", "verify", "S", "--dry-run", code=1).out
        assert shown.startswith("1 unit damaged:") and "is passed over" in shown and "1 file next to" in shown
    assert file.exists() and space.read_bytes() == b"?"
    assert "was removed" in run("store", "verify", "S", code=1).out
    assert not file.exists()
    assert "says nothing to store ls" in run("store", "ls", "S", "--dry-run", code=2).err


def test_store_actions_with_the_label_of_a_damaged_text(here: Path, run) -> None:
    """Its last unit has a block and more, so that the index does not say what is left."""
    put = ("store", "put", "S", "kv.npz", "--token-ids", "ids.json", "--fingerprint", "m", "--label")
    for tokens, label in ((64, "head"), (148, "a")):
        ids = [*range(100, 100 + tokens)]
        np.savez("kv.npz", **arrays(ids))
        Path("ids.json").write_text(json.dumps(ids))
        run(*put, label)
    run("store", "pin", "S", "a")
    _, file = sorted(Path("S/units").glob("*/*.unit"))
    file.unlink()
    assert "(damaged: store verify)" in run("store", "ls", "S").out
    for action in (("stat", "S", "a"), ("export", "S", "a", "-o", "x")):
        shown = run("store", *action, code=1).err
        assert "'a': its text is damaged: 64 of 148 tokens are left (kvmnn store verify): " in shown
        assert "its file is gone" in shown
    run(*put, "a")
    _, file = sorted(Path("S/units").glob("*/*.unit"))
    file.write_bytes(b"damaged")
    got = run("store", "get", "S", "a", "-o", "o.npz")
    assert "64 of 148 tokens" in got.out and "damaged, was removed" in got.err
    shown = run("store", "stat", "S", "a", code=1).err
    assert "'a': its text is damaged, or was evicted: 64 of 148 tokens are left (kvmnn store verify)" in shown
    assert run("store", "match", "S", "a").out.strip() == "64"
    assert "unpinned" in run("store", "unpin", "S", "a").out


def test_store_verify_of_read_only_store(here: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    monkeypatch.setattr("kvmnn.cli.commands.store.os.access", lambda *_: False)
    assert "1 unit, 50 tokens" in run("store", "verify", "S").out
    (file,) = Path("S/units").glob("*/*.unit")
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        said = run("store", "verify", "S", code=1).out
        assert said.startswith("1 unit damaged:") and "is passed over" in said
    assert file.exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["put", "S"], "store put needs CACHE"),
        (["ls", "S", "--namespace", "a/b"], "namespace is 'a/b': expected 1 to 64 letters"),
        (["put", "S", "long.npz"], "store put needs --token-ids IDS"),
        (["put", "S", "x", "--codec", "mnn", "--rope", "dims=16"], "--rope needs --codec dense"),
        (["ls", "S", "x"], "store ls takes nothing but the store"),
        (["rm", "S", "x", "y"], "one of --token-ids, --text, and a label or handle"),
        (["rm", "S", "x", "--token-ids", "5"], "one of --token-ids, --text, and a label or handle"),
        (["rm", "S"], "store rm needs --token-ids IDS, or a label or handle"),
        (["match", "S", "--text", "t.txt"], "--text needs --model DIR"),
        (["get", "S", "--token-ids", "long.json"], "store get needs -o OUT"),
        (["export", "S", "--token-ids", "long.json", "-o", "-"], "store export needs -o FILE, a file of its own"),
        (["ls", "S", "--name", "x"], "--name says nothing to store ls"),
        (["match", "S", "--token-ids", "long.json", "--size-limit", "1"], "--size-limit says nothing to store match"),
        (["import", "S", "a", "b"], "store import takes one file"),
        (["put", "", "long.npz", "--token-ids", "long.json", "--fingerprint", "m"], "the store has no name: expected"),
        (["put", "S", "long.npz", "--size-limit", "0"], "store put --size-limit 0: expected at least 1, or no bound"),
        (["put", "memory://x", "long.npz"], "memory://x: is gone when this command ends"),
        (["putt", "S"], "did you mean 'put'"),
    ],
)
def test_store_usage_errors(here: Path, run, argv: list[str], said: str) -> None:
    assert said in run("store", *argv, code=2).err
    assert not Path("S").exists()


@pytest.mark.parametrize("action", ["match", "ls", "get", "verify", "gc", "rm", "export"])
def test_store_actions_need_an_existing_store(here: Path, run, action: str) -> None:
    more = ["--token-ids", "long.json"] if action in ("match", "get", "rm", "export") else []
    more += ["-o", "x.npz"] if action in ("get", "export") else []
    assert "S: is not a prefix store: there is no such directory" in run("store", action, "S", *more, code=1).err
    assert not Path("S").exists()


def test_store_put_of_unreadable_input_creates_no_store(here: Path, run) -> None:
    run("store", "put", "S", "nothing.npz", "--token-ids", "long.json", "--fingerprint", "m", code=1)
    run("store", "import", "S", "long.json", code=1)
    said = run("store", "put", "S", "long.npz", "--token-ids", "long.json", code=2).err
    assert "long.npz: does not say which model computed it" in said
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--model", "nothing", code=1)
    run("store", "put", "S", "long.npz", "--token-ids", "nothing.json", "--fingerprint", "m", code=1)
    assert not Path("S").exists()


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("1,x,3", "number 2 is x"),
        ("[1, 2", "one of its brackets is missing"),
        ("[1, 2.5]", "number 2 is 2.5"),
        ("5,", "number 2 is empty"),
        ("5.5", "number 1 is 5.5"),
        ("5,-7", "number 2 is -7"),
        ("-7", "number 1 is -7"),
        ("5,99999999999", "number 2 is 99999999999"),
        ("4294967296", "number 1 is 4294967296"),
        ("5,4294967296", "number 2 is 4294967296"),
        ("5 6 7e3,", "number 3 is 7e3"),
        ("[]", "it is empty"),
        ("", "it is empty"),
        (" ", "it is empty"),
    ],
)
def test_store_invalid_token_ids_are_refused(here: Path, run, said: str, wrong: str) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    error = run("store", "match", "S", f"--token-ids={said}", code=2).err
    expected = "expected numbers from 0 to 4,294,967,295 between commas, as 5,7,9, or a file's name"
    assert f"--token-ids {said or repr('')}: {wrong}: {expected}" in error


def test_store_token_ids_beyond_32_bits_are_refused(here: Path, run) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    for number in (2**32, 2**40):
        Path("large.json").write_text(f"[5, {number}]")
        error = run("store", "match", "S", "--token-ids", "large.json", code=1).err
        assert f"large.json: token ids: number 2: expected one from 0 to 4,294,967,295, found {number:,}" in error


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["get", "S", "-o", "x.npz"], 1, "S: nothing of this text of 3 tokens is stored under this model"),
        (["rm", "S"], 1, "S: holds 0 tokens of this text of 3 under this model"),
        (["pin", "S"], 1, "S: holds 0 tokens of this text of 3 under this model"),
        (["export", "S", "-o", "x"], 1, "S: holds 0 tokens of this text of 3 under this model"),
        (["match", "T"], 1, "T: is not a prefix store: there is no such directory"),
        (["match", "S", "--fingerprint", "x"], 1, "S: holds prefixes of the model m, not of x"),
        (["put", "S", "other.npz"], 2, "other.npz: does not say which model computed it"),
    ],
)
def test_store_json_of_failures_is_one_document(here: Path, run, argv: list[str], code: int, said: str) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    found = run("store", *argv, "--token-ids", "other.json", "--json", code=code)
    document = json.loads(found.out)
    assert (document.pop("verb"), document["error"].startswith(said)) == (f"store {argv[0]}", True)
    assert said in found.err
    if argv[0] == "get":
        assert (document["tokens"], document["asked"], document["notes"]) == (0, 3, [])


def test_store_get_damaged_unit_is_removed_with_warning(here: Path, run) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    (file,) = Path("S/units").glob("*/*.unit")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    error = run("store", "get", "S", "--token-ids", "long.json", "-o", "x.npz", code=1).err
    assert "kvmnn: warning: " in error and "damaged, was removed (tokens 0 to 49 of a text)" in error
    assert "nothing of this text of 50 tokens is stored" in error


def test_store_get_damaged_unit_at_url_is_removed(here: Path, run) -> None:
    pytest.importorskip("fsspec")
    there = f"file://{here}/F"
    run("store", "put", there, "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    (file,) = Path("F/units").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    error = run("store", "get", there, "--token-ids", "long.json", "-o", "x.npz", code=1).err
    assert "was removed" in error and "passed over" not in error
    assert run("store", "match", there, "--token-ids", "long.json", code=1).out == "0\n"


def test_store_missing_arguments_are_named(run) -> None:
    assert "are required: ACTION, STORE (see" in run("store", code=2).err
    assert "are required: STORE (see" in run("store", "put", code=2).err


@pytest.mark.parametrize("ids", ["100,101,102", "100 101, 102", "[100, 101, 102]", " [100 101 102] "])
def test_store_token_ids_on_the_command_line(here: Path, run, ids: str) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    assert run("store", "match", "S", "--token-ids", ids).out == "3\n"
    assert "cannot be read" in run("store", "match", "S", "--token-ids", "nothing.json", code=1).err
    Path("100").write_text("7")
    assert run("store", "match", "S", "--token-ids", "100", code=1).out == "0\n", "a file of this name holds ids"


def test_store_lost_index_is_rebuilt_with_warning(here: Path, run) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    Path("S/index.sqlite").unlink()
    warning = "kvmnn: warning: S: the index was lost or damaged ({}): made again, with 1 unit"
    assert "index.sqlite is gone" in run("store", "verify", "S", "--dry-run", code=1).err, "which changes nothing"
    found = run("store", "gc", "S")
    assert warning.format("index.sqlite is gone") in found.err
    assert run("store", "match", "S", "--token-ids", "long.json").out == "50\n"
    for number, action in enumerate((("match", "S", "--token-ids", "long.json"), ("ls", "S"), ("stat", "S")), 1):
        Path(f"S/index-{number}.sqlite").write_bytes(b"noise")
        found = run("store", *action)
        assert warning.format("file is not a database") in found.err and "50" in found.out, action
        assert not run("store", *action).err, action


def test_store_json_has_every_note(here: Path, run) -> None:
    """Notes of a damaged index and a damaged unit, for hits and misses, and with -q."""
    put = ["store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m"]
    get = ["store", "get", "S", "--token-ids", "long.json", "-o", "x.npz", "--force"]
    run(*put)
    for argv, quiet in ((get, []), (get, ["-q"]), (put, [])):
        for path in Path("S").glob("index*"):
            path.unlink()
        found = run(*argv, *quiet, "--json")
        (note,) = json.loads(found.out)["notes"]
        assert "made again, with 1 unit" in note and (note in found.err) == (not quiet)
    for path in Path("S").glob("index*"):
        path.unlink()
    (unit,) = Path("S/units").glob("*/*.unit")
    unit.write_bytes(unit.read_bytes()[:-1] + b"?")
    notes = json.loads(run(*get, "--json", code=1).out)["notes"]
    assert len(notes) == 2 and "damaged, was removed" in notes[0] + notes[1] and "made again" in notes[0] + notes[1]


@pytest.mark.parametrize("positions", [[*range(20, 50)], [[*range(30)], [*range(29), 49]]], ids=["window", "heads"])
def test_store_put_of_evicted_cache_is_refused(here: Path, run, positions: list) -> None:
    """Folders that `dump-kv` wrote of an evicted cache, frames of them, and frames of a sliding window."""
    Path("cut").mkdir()
    for name, words in arrays(IDS[:30]).items():
        np.save(f"cut/{name}.npy", words)
    whole = [{"positions": [*range(30)]}]
    put = ("--token-ids", "short.json", "--fingerprint", "m")
    Path("cut/positions.json").write_text(json.dumps({"tokens_seen": 50, "layers": [*whole, {"positions": positions}]}))
    run("encode", "cut", "-o", "cut.frames")
    for name in ("cut", "cut.frames"):
        said = run("store", "put", "S", name, *put, code=1).err.replace("\n", " ")
        assert f"{name}: layer 1 was cut: a cache without some tokens is no prefix" in said
    Path("cut/positions.json").write_text(json.dumps({"tokens_seen": 50, "layers": whole * 2}))
    run("store", "put", "S", "cut", *put)


def test_store_verify_rebuilt_index_is_exit_code_1(here: Path, run) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    Path("S/index.sqlite").write_bytes(b"no database" * 99)
    made = run("store", "verify", "S", "--json", code=1)
    assert len(json.loads(made.out)["rebuilt_parts"]) == 1
    assert "1 unit, 50 tokens" in run("store", "verify", "S").out
    error = run("store", "stat", "redis://127.0.0.1:1/0?password=hunter2", code=1).err
    assert "password=***" in error and "hunter2" not in error


def test_store_token_id_files_with_bom_and_booleans(here: Path, run) -> None:
    """A byte order mark is accepted; true is no number."""
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    Path("marked.json").write_bytes(b"\xef\xbb\xbf" + Path("short.json").read_bytes())
    assert run("store", "match", "S", "--token-ids", "marked.json").out == "30\n"
    Path("true.json").write_text("[3, true]")
    error = run("store", "match", "S", "--token-ids", "true.json", code=1).err
    assert "true.json: token ids: number 2 is true: expected a whole number" in error


def test_store_text_label_and_handle_in_place_of_ids(here: Path, run) -> None:
    pytest.importorskip("tokenizers")
    from kvmnn.lm.tokenizer import Tokenizer, encode_prompt

    folder, text = Path("model"), "A file that is read again and again."
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / "lm" / name, folder)
    ids = encode_prompt(Tokenizer.open_for_model(folder), text)
    Path("text.txt").write_text(text)
    np.savez("text.npz", **arrays(ids))
    model = ("--model", "model", "--fingerprint", "m")
    assert (
        f"{len(ids)} tokens, {len(ids)} of them new"
        in run("store", "put", "S", "text.npz", "--text", "text.txt", *model).out
    )
    assert run("store", "match", "S", "--text", "text.txt", *model).out == f"{len(ids)}\n"
    run("store", "put", "S", "other.npz", "--token-ids", "other.json", "--fingerprint", "m", "--label", "three")
    line, other_line, _ = run("store", "ls", "S").out.splitlines()
    assert line.endswith("three")
    assert other_line.endswith("  A file that is read again and again.")
    handle = other_line.split()[0]
    run("store", "put", "S", "other.npz", "--token-ids", "other.json", "--fingerprint", "m", "--model", "model")
    assert run("store", "ls", "S").out.splitlines()[0].endswith("three")  # the beginning replaces no label
    assert run("store", "stat", "S", "three").out.split() == line.split()
    assert run("store", "pin", "S", handle).out == f"{len(ids)} tokens: pinned\n"
    assert run("store", "match", "S", "A file that is read again and again.").out == f"{len(ids)}\n"
    assert run("store", "get", "S", handle, "-o", "back.npz").out.startswith(f"{len(ids)} of {len(ids)} tokens")
    run("store", "export", "S", "three", "-o", "three.kv")
    assert run("store", "rm", "S", "three").out.startswith("removed 1 unit")
    assert "there is no text with this label or handle" in run("store", "rm", "S", "three", code=1).err


def test_store_label_of_a_lost_text_is_a_miss_and_can_be_removed(here: Path, run) -> None:
    run("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m", "--label", "long")
    (unit,) = Path("S/units").glob("*/*.unit")
    unit.unlink()
    run("store", "verify", "S", code=1)
    error = run("store", "get", "S", "long", "-o", "x.npz", code=1).err
    assert "nothing of it is left" in error and "nothing of this text of 50 tokens is stored" in error
    counters = json.loads(run("store", "stat", "S", "--json").out)["usage"]["counters"]
    assert (counters["gets"], counters["requested_tokens"], counters["hits"]) == (1, 50, 0)
    assert run("store", "match", "S", "long", code=1).out == "0\n"
    removed = run("store", "rm", "S", "long").out
    assert removed.startswith("removed 0 units, 0 bytes: only the label 'long' was removed\n  50 tokens of it were dam")
    assert not list(Path("S/texts").iterdir())
    run("store", "rm", "S", "long", code=1)


def test_store_default_labels_tell_texts_of_one_beginning_apart(here: Path, run) -> None:
    pytest.importorskip("tokenizers")
    from kvmnn.lm.tokenizer import Tokenizer, encode_prompt

    Path("model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURES / "lm" / name, "model")
    tokenizer, beginning = Tokenizer.open_for_model("model"), "You are a helpful assistant who answers in few words. "
    for question in ("How large is it?", "How small is it?"):
        ids = encode_prompt(tokenizer, beginning + question)
        Path("text.txt").write_text(beginning + question)
        np.savez("text.npz", **arrays(ids))
        Path("ids.json").write_text(json.dumps([int(token) for token in ids]))
        for store, naming in (("S", ["--text", "text.txt"]), ("T", ["--token-ids", "ids.json"])):
            run("store", "put", store, "text.npz", *naming, "--model", "model", "--fingerprint", "m")
    for store in "ST":
        labels = {entry["label"] for entry in json.loads(run("store", "ls", store, "--json").out)["texts"]}
        assert labels == {"You are a helpful ... How large is it?", "You are a helpful ... How small is it?"}


def test_store_max_input_bytes_bounds_what_is_put_and_imported(here: Path, run) -> None:
    put = ("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m")
    assert "above the limit of 100" in run(*put, "--max-input-bytes", "100", code=1).err
    assert not Path("S").exists()
    run(*put, "--max-input-bytes", "1M")
    document = json.loads(run("store", "export", "S", "--token-ids", "long.json", "-o", "x.kv", "--json").out)
    assert document["label"] == "LOSSLESS"
    imported = ("store", "import", "T", "x.kv", "--max-input-bytes")
    assert "x.kv: has" in run(*imported, "100", code=1).err and not Path("T").exists()
    run(*imported, "1M")
    assert "says nothing to store ls" in run("store", "ls", "S", "--max-input-bytes", "1M", code=2).err
    run("store", "gc", "T", "--size-limit", "0")
    assert run("store", "verify", "T").out == "no units are stored\n"


@pytest.mark.parametrize("naming", ["handle", "label", "ids"])
def test_store_actions_take_handle_label_or_ids(here: Path, run, naming: str) -> None:
    put = ("store", "put", "S", "long.npz", "--token-ids", "long.json", "--fingerprint", "m", "--label", "the long one")
    run(*put)
    line = run("store", "ls", "S").out.splitlines()[0]
    name = {"handle": [line.split()[0]], "label": ["the long one"], "ids": ["--token-ids", "long.json"]}[naming]
    assert run("store", "stat", "S", *name).out.split() == line.split()
    assert json.loads(run("store", "stat", "S", *name, "--json").out)["tokens"] == 50
    assert run("store", "match", "S", *name).out == "50\n"
    assert run("store", "pin", "S", *name).out == "50 tokens: pinned\n"
    assert "pinned" in run("store", "stat", "S", *name).out
    assert run("store", "unpin", "S", *name).out == "50 tokens: unpinned\n"
    assert run("store", "get", "S", *name, "-o", "back.npz").out.startswith("50 of 50 tokens")
    assert run("store", "export", "S", *name, "-o", "long.kv").out.startswith("long.kv: 50 tokens")
    for label, expected in (((), "the long one"), (("--label", "mine"), "mine")):
        run("store", "import", "T", "long.kv", *label)
        assert run("store", "match", "T", expected).out == "50\n"
    assert run("store", "rm", "S", *name).out.startswith("removed 1 unit")
    missing = "holds 0 tokens of this text of 50" if naming == "ids" else "no text with this label or handle"
    assert missing in run("store", "stat", "S", *name, code=1).err


def test_store_stat_of_a_text_that_goes_on_is_an_error(here: Path, run) -> None:
    for name in ("short", "long"):
        run("store", "put", "S", f"{name}.npz", "--token-ids", f"{name}.json", "--fingerprint", "m", "-q")
    error = run("store", "stat", "S", "--token-ids", "short.json", code=1).err
    assert "S: this text of 30 tokens is stored, but not listed: a longer one goes on from it" in error


def test_store_get_text_of_an_onnx_model_writes_a_prefix_cache(here: Path, run) -> None:
    """The tokenizer is the ONNX model's; no MNN model is recorded with the files."""
    pytest.importorskip("tokenizers")
    from kvmnn.lm.tokenizer import Tokenizer, encode_prompt

    Path("text.txt").write_text("Why not now?")
    ids = encode_prompt(Tokenizer.open_for_model(FIXTURES / "lm"), "Why not now?")
    np.savez("text.npz", **arrays(ids))
    text = ("S", "--text", "text.txt", "--model", FIXTURES / "lm")
    run("store", "put", "S", "text.npz", *text[1:], "--force", "--rope", "none")
    found = run("store", "get", *text, "--backend", "x86-avx2", "--name", "p", "--cast", "-o", "ready")
    assert "is no MNN model: the prefix cache does not record which model it is for" in found.err
    assert json.loads(Path("ready/p.kvmnn.json").read_text())["model"] is None
    assert "is no MNN model" not in run("store", "get", *text, "-o", "text_again.npz").err


def test_store_messages_are_rendered_by_the_chat_template(here: Path, run) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    from kvmnn.lm.tokenizer import Tokenizer

    folder = Path("model")
    folder.mkdir()
    shutil.copy(FIXTURES / "lm" / "tokenizer.json", folder)
    template = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "##"}))
    Path("chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": "Why?"}]}))
    ids = Tokenizer.open_for_model(folder).encode("##<user>Why?<answer>").tolist()
    np.savez("chat.npz", **arrays(ids))
    model = ("--model", "model", "--fingerprint", "m")
    run("store", "put", "S", "chat.npz", "--text", "chat.json", *model)
    assert run("store", "match", "S", "--token-ids", ",".join(map(str, ids))).out == f"{len(ids)}\n"
    put = ("store", "put", "S", "chat.npz", "--text", "other.json", *model)
    Path("other.json").write_text(json.dumps({"messages": [{"role": "user", "content": "Why not now?"}]}))
    others = Tokenizer.open_for_model(folder).encode("##<user>Why not now?<answer>").tolist()
    error = run(*put, code=2).err
    assert f"holds {len(ids)} tokens, there are {len(others)} token ids ({len(others)} of --text, by the" in error
    Path("kv").mkdir()
    Path("kv/token_ids.json").write_text(json.dumps(ids))
    for name, words in arrays(ids).items():
        np.save(f"kv/{name}.npy", words)
    index = next(index for index, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1])
    message = f"kv: its token {index} is {ids[index]}, --text says {others[index]} (leave --text out, or --force): "
    message += f"{len(ids)} ids in the cache, {len(others)} of --text"
    assert message in run("store", "put", "S", "kv", "--text", "other.json", *model, code=2).err
    Path("chat.json").write_text(json.dumps({"messages": "Why?"}))
    assert "chat.json: messages" in run("store", "match", "S", "--text", "chat.json", *model, code=1).err
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    Path("chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": "Why?"}]}))
    assert (
        "chat.json: the chat template of model fails"
        in run("store", "match", "S", "--text", "chat.json", *model, code=1).err
    )


def test_store_get_into_a_folder_has_its_token_ids_and_none_of_before(here: Path, run) -> None:
    """Ids and positions of a dump that lay there would be taken for those of K and V that replace it."""
    ids = ("--token-ids", "long.json")
    run("store", "put", "S", "long.npz", *ids, "--fingerprint", "m")
    run("store", "get", "S", *ids, "-o", "kv/")
    assert json.loads(Path("kv/token_ids.json").read_text()) == IDS
    Path("kv/token_ids.json").write_text(json.dumps(IDS[::-1]))
    for name in ("loss.json", "positions.json"):
        Path("kv", name).write_text("{}")
    got = run("store", "get", "S", *ids, "-o", "kv/", "-f")
    assert "lay there" not in got.err and not {"loss.json", "positions.json"} & {
        path.name for path in Path("kv").iterdir()
    }
    run("store", "put", "T", "kv", "--fingerprint", "m")
    assert run("store", "match", "T", *ids).out == f"{len(IDS)}\n"


@pytest.mark.parametrize("is_remote", [False, True], ids=["directory", "url"])
@pytest.mark.parametrize("name", ["label", "ids", "ids next to another model"])
def test_store_unpin_of_a_text_that_is_gone(here: Path, run, name: str, is_remote: bool) -> None:
    store = f"file://{here}/S" if is_remote else "S"
    ids = ("--token-ids", "long.json")
    run("store", "put", store, "long.npz", *ids, "--fingerprint", "m", "--label", "story")
    run("store", "pin", store, "story")
    for path in [path for path in Path("S/units").rglob("*") if path.is_file()]:
        path.unlink()
    run("store", "verify", store, code=1)
    if "next to" in name:
        run("store", "put", store, "other.npz", "--token-ids", "other.json", "--fingerprint", "n")
    assert "  1 pinned" in run("store", "stat", store).out
    assert "50 tokens: unpinned" in run("store", "unpin", store, *(("story",) if name == "label" else ids)).out
    assert "  0 pinned" in run("store", "stat", store).out
    error = run("store", "unpin", store, *ids, code=1).err
    assert "holds 0 tokens of this text of 50 (kvmnn store ls" in error


def test_store_ls_and_stat_of_lost_files(here: Path, run) -> None:
    """``ls`` counts the bytes that are there, ``stat`` says that it counts those of the index."""
    for name in ("other", "long"):
        run("store", "put", "S", f"{name}.npz", "--token-ids", f"{name}.json", "--fingerprint", "m")
    first_path, second_path = sorted(Path("S/units").glob("*/*.unit"))
    assert "damaged" not in run("store", "stat", "S").out
    second_path.unlink()
    text, lost_text = sorted(
        json.loads(run("store", "ls", "S", "--json").out)["texts"], key=lambda text: text["tokens"]
    )
    assert (text["bytes"], lost_text["bytes"]) == (first_path.stat().st_size, 0)
    assert f"2 texts, {text['bytes']:,} bytes in all\n" in run("store", "ls", "S").out
    lost_text = "without bytes, or after such a unit: no get finds them (store verify)"
    assert f"\n  damaged: 1 unit {lost_text}\n" in run("store", "stat", "S").out
    run("store", "verify", "S", code=1)
    assert "damaged" not in run("store", "stat", "S").out


@pytest.mark.parametrize("is_remote", [False, True], ids=["directory", "url"])
def test_store_of_casts_says_lossy_of_what_it_returns(here: Path, run, is_remote: bool) -> None:
    """Whatever process gets it; exact texts of another precision stay LOSSLESS; the mark goes with the last unit."""
    store = f"file://{here}/S" if is_remote else "S"
    cast = {"schema": "kvmnn-loss", "schema_version": 1, "loss": "rounded by a cast: fp32 to fp16, 7 words changed"}
    exact = {name: words.astype(np.float32) for name, words in arrays(IDS).items()}
    np.savez("exact.npz", **exact)
    Path("rounded").mkdir()
    for name, words in arrays(IDS).items():
        np.save(f"rounded/{name}.npy", words)
    Path("rounded/loss.json").write_text(json.dumps(cast))
    ids = ("--token-ids", "long.json")
    for name in ("rounded", "exact.npz"):
        run("store", "put", store, name, *ids, "--fingerprint", "m")
    copied, loss = "LOSSLESS copy of LOSSY K and V (", "LOSSY: rounded by a cast: fp32 to fp16\n"
    np.savez("same.npz", **arrays(IDS))
    for name, has_note in (("rounded", False), ("same.npz", True)):  # exact words do not replace rounded ones
        said = run("store", "put", store, name, *ids, "--fingerprint", "m").out
        assert ("stay as they were stored before" in said and "rounded by a cast: fp32 to fp16" in said) == has_note
    said = run("store", "get", store, *ids, "--dtype", "fp16", "-o", "back/").out
    assert copied in said and said.endswith(loss)
    assert json.loads(Path("back/loss.json").read_text())["loss"] == "rounded by a cast: fp32 to fp16"
    assert "LOSSLESS (" in run("store", "get", store, *ids, "--dtype", "fp32", "-o", "back32/").out
    (record,) = Path("S").glob("losses/*" if is_remote else "spaces/*.loss")
    loss_text, unreadable = record.read_bytes(), "LOSSY: K and V lost something before they were put, and the record of"
    for damage in (lambda: record.write_bytes(b""), record.unlink):
        damage()
        said = run("store", "get", store, *ids, "--dtype", "fp16", "-o", "x/", "-f").out
        assert copied in said and unreadable in said
        assert copied in run("store", "export", store, *ids, "--dtype", "fp16", "-o", "text.kv", "-f").out
        matched = run("store", "match", store, *ids, "--dtype", "fp16").out
        assert matched == "50 LOSSY\n"
        assert "LOSSY before the put, some texts: K and V lost" in run("store", "stat", store).out
        assert max(map(len, run("store", "stat", store).out.splitlines())) <= 80
        verified = run("store", "verify", store).out
        assert "2 units (1 LOSSY)" in verified and "LOSSLESS" not in verified
    record.write_bytes(loss_text)
    Path("exact.json").write_text(json.dumps([7, *range(100, 140)]))
    np.savez("short.npz", **arrays([7, *range(100, 140)]))
    run("store", "put", store, "short.npz", "--token-ids", "exact.json", "--fingerprint", "m")
    assert "LOSSLESS (" in run("store", "get", store, "--token-ids", "exact.json", "--dtype", "fp16", "-o", "y/").out
    run("store", "rm", store, "--token-ids", "exact.json")
    assert run("store", "match", store, *ids, "--dtype", "fp16").out == "50 LOSSY\n"
    lossy_lines = [line for line in run("store", "ls", store).out.splitlines() if "50 tokens" in line]
    assert sorted(("fp16" in line, "LOSSY" in line) for line in lossy_lines) == [(False, False), (True, True)]
    assert "LOSSY" not in run("store", "match", store, *ids, "--dtype", "fp32").out
    stat = ("store", "stat", store, *ids, "--dtype", "fp16")
    assert "\n  LOSSY: rounded by a cast: fp32 to fp16\n" in run(*stat).out
    Path("text.kv").unlink()
    assert copied in run("store", "export", store, *ids, "--dtype", "fp16", "-o", "text.kv").out
    assert "LOSSY: rounded by a cast: fp32 to fp16" in run("store", "import", "T", "text.kv").out
    assert copied in run("store", "get", "T", *ids, "-o", "again/").out
    again = {**cast, "loss": "K and V are rounded; KL divergence of the predictions: 0.002 nats"}
    Path("rounded/loss.json").write_text(json.dumps(again))
    run("store", "put", store, "rounded", *ids, "--fingerprint", "m", code=2)
    run("store", "rm", store, *ids)
    run("store", "gc", store)
    run("store", "put", store, "long.npz", *ids, "--fingerprint", "m")
    Path("rounded/loss.json").write_text(json.dumps(cast))
    said = run("store", "put", store, "rounded", *ids, "--fingerprint", "m").out
    assert "have not lost what these K and V had lost: rounded by a cast: fp32 to fp16" in " ".join(said.split())
    assert "LOSSY" not in run("store", "stat", store).out + run("store", "ls", store).out
    assert "LOSSLESS (" in run("store", "get", store, *ids, "-o", "exact/").out


def test_store_by_a_profile_says_lossy_in_every_action(here: Path, run) -> None:
    """``--codec transform:FILE`` makes it; later calls find the profile, or name it, or say which one is missing."""
    import transform_samples

    from kvmnn.dense.rope import RopeConfig

    geometry = transform_samples.create_geometries(2, 2, 8, 8, RopeConfig(10000.0, 8))
    transform_samples.create_profile(geometry).write("p.kvmp")
    caches = transform_samples.create_caches(5, 50, geometry)
    named = {f"layer_{c.layer}.{part}": w for c in caches for part, w in (("key", c.keys), ("value", c.values))}
    np.savez("kv.npz", **named)
    put = ("store", "put", "S", "kv.npz", "--token-ids", "long.json", "--fingerprint", "m")
    run(*put, "--codec", "transform:p.kvmp,recent=3", code=2)
    run(*put, "--codec", "transform:p.kvmp", "--profile", "p.kvmp", code=2)
    run(*put, "--codec", "transform:p.kvmp", "--rope", "none", code=2)
    np.save("drawn.npy", np.ones((2, 2, 50), np.float32))
    assert "needs --codec transform" in run(*put, "--attention", "drawn.npy", code=2).err
    assert not Path("S").exists()
    assert "LOSSY: K and V are rounded" in run(*put, "--codec", "transform:p.kvmp,kl=0.02,first=8").out
    get = ("store", "get", "S", "--token-ids", "long.json", "-o")
    said = run(*get, "a.npz").out
    assert "LOSSY: K and V are not exactly those that were put" in said and "LOSSLESS" not in said
    assert "put, 0.02 nats a token expected" in said
    assert "KL divergence of the predictions: 0.02 nats" in " ".join(kvmnn.open("a.npz").notes)
    document = json.loads(run(*get, "b.npz", "--json").out)
    assert document["label"] == "LOSSY" and document["predicted_kl"] == pytest.approx(0.02)
    described = run("store", "stat", "S", "--token-ids", "long.json")
    assert "LOSSY: K and V are rounded (transform streams), 0.02 nats a token expected" in described.out
    for action in ("ls", "stat"):
        output = run("store", action, "S").out
        assert "LOSSY: K and V are rounded" in output and "store stat STORE TEXT" in output
    with np.load("a.npz") as back:
        assert np.array_equal(back["layer_1.key"][:, :8], named["layer_1.key"][:, :8])
        assert not np.array_equal(back["layer_1.key"], named["layer_1.key"])
    mark = "LOSSY: K and V are rounded: from a prefix store of transform streams"
    packed = ("--backend", "x86-avx2", "--cast", "--name", "p")
    for name, options in (("a.safetensors", ()), ("packed/", packed)):
        run(*get, name, *options)
    run("encode", "a.npz", "-o", "frames")
    for name in ("a.npz", "a.safetensors", "packed/", "frames"):
        run("mnn", "unpack", name, "-o", f"{name.strip('/')}.again.npz")
        assert mark in " ".join(kvmnn.open(f"{name.strip('/')}.again.npz").notes), name
    again = ("store", "put", "R", "a.npz", "--token-ids", "long.json", "--fingerprint", "m")
    assert "is LOSSY, as it records" in run(*again, code=2).err and not Path("R").exists()
    assert "is LOSSY, as it records" in run(*again, "--force", code=2).err and not Path("R").exists()
    run(*get, "folder/")
    refused = run("store", "put", "F", "folder", "--token-ids", "long.json", "--fingerprint", "m", code=2).err
    assert "is LOSSY, as it records" in refused and not Path("F").exists()
    for action in ("ls", "stat", "verify", "gc"):
        out = run("store", action, "S").out
        assert "LOSSY" in out and "LOSSLESS" not in out
    for action in ("match", "pin", "unpin"):
        document = json.loads(run("store", action, "S", "--token-ids", "long.json", "--json").out)
        assert document["is_lossy"], action
    Path("trace.jsonl").write_text("5 6 7\n5 6 7\n")
    shape = ("--model-shape", "2x2x8", "--size", "1M", "--ratio", "measured", "--codec")
    for codec, count in (("transform:p.kvmp", 1), ("dense", 0)):
        assert run("store", "simulate", "trace.jsonl", "kv.npz", *shape, codec).out.count("LOSSY") == count
    assert "codec options kl=0.02, first=8\n" in run("store", "stat", "S").out
    run("store", "export", "S", "--token-ids", "long.json", "-o", "text.kv")
    dense = ("store", "import", "U", "text.kv", "--codec", "dense")
    assert "--codec transform:PROFILE" in run(*dense, "--profile", "p.kvmp", code=2).err
    assert not Path("U").exists()  # a store of another codec
    adopted = run("store", "import", "A", "text.kv")
    assert "is LOSSY, of transform streams by" in adopted.err
    assert "p.kvmp, kl=0.02, first=8, and so is the new store" in adopted.err
    assert "rounded once more" not in adopted.out and "0.02 nats a token expected" in adopted.out
    assert json.loads(run("store", "stat", "A", "--json").out)["codec_options"] == {"kl": 0.02, "first": 8}
    imported = run("store", "import", "E", "text.kv", "--codec", "transform:p.kvmp,kl=0.02,first=8").out
    assert "rounded once more" not in imported and "0.02 nats a token expected" in imported
    imported = run("store", "import", "U", "text.kv", "--codec", "transform:p.kvmp,kl=0.03").out
    assert "rounded once more" in imported and "nats not known" in imported
    assert "expected" not in run("store", "put", "S", "kv.npz", "--token-ids", "long.json", "--fingerprint", "m").out
    Path("p.kvmp").rename("elsewhere")
    missing = run(*get, "c.npz", code=1).err
    assert "need the profile" in missing and "(p.kvmp)" in missing and "--profile FILE" in missing
    assert not Path("c.npz").exists()
    run("store", "verify", "S", code=1)
    run("store", "verify", "S", "--profile", "elsewhere")
    run(*get, "c.npz", "--profile", "elsewhere")
    assert (
        "LOSSY as stored"
        in run("store", "export", "S", "--token-ids", "long.json", "-o", "x.kv", "--profile", "elsewhere").out
    )
    run("store", "put", "plain", "kv.npz", "--token-ids", "long.json", "--fingerprint", "m")
    Path("far/away").mkdir(parents=True)
    shutil.copy("x.kv", "far/away/x.kv")
    for options in ((), ("--profile", "elsewhere")):  # no advice to name the profile, which would lead nowhere
        refused = run("store", "import", "plain", "far/away/x.kv", *options, code=2).err
        assert "is LOSSY" in refused and "--codec transform:PROFILE" in refused
    assert "--profile FILE says where" in run("store", "import", "T", "far/away/x.kv", code=1).err
    assert not Path("T").exists()
    assert "--profile FILE" in run("store", "import", "U", "far/away/x.kv", code=1).err
    run("store", "import", "U", "far/away/x.kv", "--profile", "elsewhere")
    assert "LOSSY" in run("store", "import", "V", "x.kv", "--codec", "transform:elsewhere").out
    assert json.loads(run("store", "stat", "V", "--json").out)["codec_options"] == {"kl": 0.002}  # the default
