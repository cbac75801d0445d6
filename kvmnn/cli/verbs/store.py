"""``kvmnn store``: K and V of texts, kept and found again by the longest beginning that was put."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .. import (
    axes_options,
    dense_options,
    engine_options,
    help,
    idle_options,
    loading,
    packed_options,
    printing,
    shared_options,
    store_actions,
)
from ..printing import Result, UsageError

if TYPE_CHECKING:
    from ...arrays.source import Source
    from ...dense import Rotary

_TEXT = """Keep K and V of texts in a directory and find them again by their token ids: any text is answered with the
longest beginning that was ever put, to the token. Equal beginnings are stored once, losslessly (docs/prefix-store.md).
Sliding windows and the state of linear attention are stored with a text, at its exact length: such a text is resumed
only from lengths that were put.

  put STORE CACHE...  store K and V of a text
  match STORE         how many tokens of a text are stored; exit 1 if none
  get STORE -o OUT    write the longest stored beginning: arrays as unpack
                      writes them, or with --backend and --name the prefix
                      cache that an engine loads (--cast: in its dtype);
                      --partial: full attention alone, without windows
                      and state, which no model continues from
  ls, stat STORE      the stored texts; counts and sizes
  verify STORE        decode and compare everything; what is damaged goes
  gc STORE            remove what nothing refers to; --max-bytes SIZE: and
                      texts that were not used for longest, down to SIZE
  rm STORE            remove what no other text continues
  pin, unpin STORE    keep a text whatever the bound, or no longer
  export STORE -o F   write a text to one file, for another machine
  import STORE F      take in such a file

A text is said by --token-ids: numbers (5,7,9), or a file: a JSON list, numbers or .npy; - is standard input; put
needs none for a cache that has its ids, as llama.cpp's sessions do. CACHE is anything kvmnn reads: an engine's prefix
cache, live files of a running engine, a dump, frames, arrays called layer_<n>.key and layer_<n>.value. Which model
computed it is said by --model, whose fingerprint is taken (the folder of an MNN model, with its .mnn file, or a
llama.cpp FILE.gguf), or for any other model, such as a folder of transformers, by --fingerprint TEXT; both together
name a model and the settings that it ran with, where they change K and V ("memory=low precision=low"); put
needs neither for a cache that knows its model, all else where the store has one model. A store takes a second model
only with --force."""


class _Action(NamedTuple):
    options: tuple[str, ...] = ()
    inputs: str = ""
    """What follows the store; empty for nothing."""


_MODEL = ("token_ids", "model", "fingerprint", "dtype")
_LAYOUT = ("backend", "lp", "hp", "flash_block", "name", "capacity")
_INPUT = (
    *("tensor", "skip_unsupported", "token_major", "undo"),
    *(*axes_options.NAMES, *packed_options.LAYING, *engine_options.CHOOSING),
)
_MAKING_OPTIONS = ("store_bytes", "block_tokens", "codec", "effort", "threads")
_ACTIONS = {
    "put": _Action((*_MODEL, *_INPUT, *_MAKING_OPTIONS, "rope", "force"), "CACHE"),
    "match": _Action(_MODEL),
    "get": _Action((*_MODEL, *_LAYOUT, "output", "force", "threads", "cast", "rerotate", "partial")),
    "ls": _Action(),
    "stat": _Action(),
    "verify": _Action(("threads",)),
    "gc": _Action(("store_bytes",)),
    "rm": _Action(_MODEL),
    "pin": _Action(_MODEL),
    "unpin": _Action(_MODEL),
    "export": _Action((*_MODEL, "output", "force")),
    "import": _Action((*_MAKING_OPTIONS, "rope"), "FILE"),
}
_ALL = tuple(dict.fromkeys(name for action in _ACTIONS.values() for name in action.options))
_MAKING = ("put", "import")
_LOOKING = ("match", "ls", "stat", "export")
_READING = ("get", "verify")
"""What writes to a store only if that can be written to: uses are noted down, and what is damaged is removed."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "store", run, "prefixes kept, and found again by their tokens", _TEXT)
    parser.add_argument("action", choices=tuple(_ACTIONS), metavar="ACTION", help=", ".join(_ACTIONS))
    parser.add_argument("store", metavar="STORE", help="a directory, redis:// or s3:// ...; put and import make it")
    parser.add_argument(
        "inputs", nargs="*", default=[], metavar="IN", help="put: caches of the text; import: a file of export"
    )
    packed_options.add_text(parser, "its fingerprint says which model computed it")
    parser.add_argument(
        "--fingerprint",
        metavar="TEXT",
        help="which model computed it, where no --model tells; beside --model the engine's settings",
    )
    parser.add_argument(
        "--max-bytes",
        dest="store_bytes",  # of inputs other verbs have a bound
        type=shared_options.byte_count,
        metavar="SIZE",
        help="put, import, gc: most bytes of all units (default: no bound)",
    )
    parser.add_argument(
        "--block-tokens", type=shared_options.positive, metavar="N", help="of a store that is made (default: 64)"
    )
    parser.add_argument(
        "--codec",
        choices=("dense", "frames"),
        help="of a store that is made: dense streams where they are smaller (default), or frames",
    )
    dense_options.add_rope(parser)
    parser.add_argument(
        "--effort",
        choices=shared_options.EFFORTS,
        default="fast",
        help="of frames: how hard to compress (default: fast, within 1%% of exact)",
    )
    parser.add_argument(
        "--threads", type=shared_options.positive, metavar="N", help="threads (default: all processors)"
    )
    shared_options.add_output(parser, "get: file or directory; export: a file")
    parser.add_argument(
        "--capacity", type=shared_options.positive, metavar="N", help="get: tokens that a prefix cache has room for"
    )
    parser.add_argument(
        "--cast", action="store_true", help="get: convert to the backend's dtype; LOSSY if it is narrower"
    )
    parser.add_argument(
        "--rerotate",
        action="store_true",
        help="get: K at the positions 0, 1, 2 ..., as pack --rerotate; a stored prefix has these already",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="get: layers with full attention alone, where windows or state are not stored at this length",
    )
    shared_options.add_source(parser, "put: what raw words are; else which precision is meant")
    parser.add_argument("--token-major", action="store_true", help="put: arrays are [token, kv_head, head_dim]")
    packed_options.add_packed(parser, text=False, undo=True)
    options = {name: (*action.options, *(["inputs"] if action.inputs else [])) for name, action in _ACTIONS.items()}
    help.narrow(parser, "action", options, _said)


def _said(action: str) -> str:
    """What the help of all says of one action."""
    title, _, rest = _TEXT.partition("\n\n")
    lines = re.findall(rf"^  (?:\w+, )?{action}\b.*(?:\n {{10,}}.*)*", rest, re.MULTILINE)
    about_texts = ["", rest.rpartition("\n\n")[2]] if "token_ids" in _ACTIONS[action].options else []
    return "\n".join([title, "", *lines, *about_texts])


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out; with ``--json`` a failure has its document, too."""
    from ...errors import KvmnnError

    arguments.noted = []
    try:
        result, code = _done(arguments)
    except KvmnnError as error:
        if arguments.json:
            found = _with_notes(getattr(arguments, "found", {}), arguments.noted)
            said = packed_options.in_the_words_of(arguments, str(error))
            printing.print_json({"verb": f"store {arguments.action}", **found, "error": said})
        raise
    printing.show(arguments, f"store {arguments.action}", _Noted(result, arguments.noted))
    return code


class _Noted(NamedTuple):
    """A result whose document has the notes that went to standard error, too."""

    result: Result
    noted: list[str]

    def to_dict(self) -> dict[str, Any]:
        return _with_notes(self.result.to_dict(), self.noted)

    def __str__(self) -> str:
        return str(self.result)


def _with_notes(document: dict[str, Any], noted: list[str]) -> dict[str, Any]:
    notes = list(dict.fromkeys([*document.get("notes", []), *noted]))
    return document | {"notes": notes} if notes else document


def _done(arguments: argparse.Namespace) -> tuple[Result, int]:
    from ...files.urls import without_secret
    from ...store import PrefixStore, read_exported

    action = _ACTIONS[arguments.action]
    idle = [name for name in _ALL if name not in action.options]
    idle_options.refuse(arguments, idle, f"says nothing to store {arguments.action}")
    if bool(arguments.inputs) != bool(action.inputs):
        wanted = f"needs {action.inputs}" if action.inputs else "takes nothing but the store"
        raise UsageError(f"store {arguments.action} {wanted}")
    if arguments.action == "import" and len(arguments.inputs) > 1:
        raise UsageError("store import takes one file")
    if "token_ids" in action.options and arguments.token_ids is None and arguments.action != "put":
        raise UsageError(f"store {arguments.action} needs --token-ids IDS")
    if "output" in action.options and arguments.output in (None, printing.STDIO):
        what = "FILE, a file of its own" if arguments.action == "export" else "OUT, a file or directory"
        raise UsageError(f"store {arguments.action} needs -o {what}")
    if arguments.store.startswith("memory://"):
        raise UsageError(f"{arguments.store}: is gone when this command ends: expected a place that stays")
    if arguments.codec == "frames":
        idle_options.refuse(arguments, ["rope"], "needs --codec dense")
    making = arguments.action in _MAKING
    if making and arguments.store_bytes == 0:
        raise UsageError(f"store {arguments.action} --max-bytes 0: expected at least 1, or no bound")
    if making:  # of an input that cannot be read no store is made
        if arguments.action == "import":
            arguments.read = read_exported(arguments.inputs[0])
        else:
            arguments.read = _source(arguments)
            arguments.made_by = _made_by(arguments)
            arguments.layers = store_actions.layers_read(arguments.read, arguments)
    store = PrefixStore(
        arguments.store,
        arguments.store_bytes if making else None,
        block_tokens=arguments.block_tokens,
        codec=arguments.codec,
        rotary=_rotary(arguments) if making else None,
        effort=arguments.effort,
        threads=arguments.threads,
        create=making,
        read_only=arguments.action in _LOOKING or (arguments.action in _READING and _is_fixed(arguments.store)),
    )
    arguments.store = without_secret(arguments.store)  # messages name it
    with store:
        try:
            done: tuple[Result, int] = store_actions.ACTIONS[arguments.action](store, arguments)
        finally:
            loading.report_notes(store.notes, arguments, "warning")
    return done


def _is_fixed(store: str) -> bool:
    """Whether a store is a directory that cannot be written to."""
    return os.path.isdir(store) and not os.access(store, os.W_OK)


def _source(arguments: argparse.Namespace) -> Source:
    from ...arrays.own_order import for_other_engines
    from ...store.state_arrays import take_states

    source = take_states(loading.load(arguments.inputs, arguments, frames=True, used=("model", "token_ids")))
    loading.report_skipped(source, arguments)
    if store_actions.ids_of(source, arguments) is None:
        where = " ".join(arguments.inputs)
        if (cache := source.engine_cache) is not None and cache.texts:
            raise UsageError(f"{where}: is a batch of {cache.batch}: --batch N takes one text of it, from 0")
        raise UsageError(f"{where}: does not say its token ids: store put needs --token-ids IDS")
    source, notes = for_other_engines(source)
    loading.report_notes(notes, arguments)
    return source


def _rotary(arguments: argparse.Namespace) -> Rotary | Literal["none"] | None:
    """How K was rotated, as far as ``--rope`` or ``--model`` says it."""
    from ...errors import KvmnnError

    if arguments.rope is not None or arguments.model is None:
        said: Rotary | Literal["none"] | None = arguments.rope
        return said
    try:
        return dense_options.model_rotary(arguments.model, arguments.read)[0]
    except KvmnnError:  # it says nothing: the store looks for it
        return None


def _made_by(arguments: argparse.Namespace) -> str:
    """The model of what is put: as the options say, else as the cache itself does."""
    source = arguments.read
    said = store_actions.fingerprint_said(arguments)
    if said is None and source.cache:
        said = source.cache.model
    if said is None:
        raise UsageError(
            f"{' '.join(arguments.inputs)}: does not say which model computed it: --model or --fingerprint says it"
        )
    return said
