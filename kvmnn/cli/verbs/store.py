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
from ..printing import CommandResult, UsageError

if TYPE_CHECKING:
    from ...arrays.source import Source
    from ...dense import RopeConfig

_DESCRIPTION = """\
Keep K and V of texts in a directory and find them again by their token ids: any text is answered with the
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


class _ActionSpec(NamedTuple):
    options: tuple[str, ...] = ()
    inputs: str = ""
    """What follows the store; empty for nothing."""


_MODEL_OPTIONS = ("token_ids", "model", "fingerprint", "dtype")
_LAYOUT_OPTIONS = ("backend", "lp", "hp", "flash_block", "name", "capacity")
_INPUT_OPTIONS = (
    *("tensor", "skip_unsupported", "token_major", "undo"),
    *(*axes_options.AXES_OPTION_NAMES, *packed_options.PACKED_OPTION_NAMES, *engine_options.SELECTION_OPTIONS),
)
_CREATION_OPTIONS = ("store_bytes", "block_tokens", "codec", "effort", "threads")
_SPEC_BY_ACTION = {
    "put": _ActionSpec((*_MODEL_OPTIONS, *_INPUT_OPTIONS, *_CREATION_OPTIONS, "rope", "force"), "CACHE"),
    "match": _ActionSpec(_MODEL_OPTIONS),
    "get": _ActionSpec(
        (*_MODEL_OPTIONS, *_LAYOUT_OPTIONS, "output", "force", "threads", "cast", "rerotate", "partial")
    ),
    "ls": _ActionSpec(),
    "stat": _ActionSpec(),
    "verify": _ActionSpec(("threads",)),
    "gc": _ActionSpec(("store_bytes",)),
    "rm": _ActionSpec(_MODEL_OPTIONS),
    "pin": _ActionSpec(_MODEL_OPTIONS),
    "unpin": _ActionSpec(_MODEL_OPTIONS),
    "export": _ActionSpec((*_MODEL_OPTIONS, "output", "force")),
    "import": _ActionSpec((*_CREATION_OPTIONS, "rope"), "FILE"),
}
_ALL_OPTIONS = tuple(dict.fromkeys(name for action in _SPEC_BY_ACTION.values() for name in action.options))
_CREATING_ACTIONS = ("put", "import")
_READ_ONLY_ACTIONS = ("match", "ls", "stat", "export")
_READ_IF_POSSIBLE_ACTIONS = ("get", "verify")
"""What writes to a store only if that can be written to: uses are noted down, and what is damaged is removed."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "store", run, "prefixes kept, and found again by their tokens", _DESCRIPTION
    )
    parser.add_argument("action", choices=tuple(_SPEC_BY_ACTION), metavar="ACTION", help=", ".join(_SPEC_BY_ACTION))
    parser.add_argument("store", metavar="STORE", help="a directory, redis:// or s3:// ...; put and import make it")
    parser.add_argument(
        "inputs", nargs="*", default=[], metavar="IN", help="put: caches of the text; import: a file of export"
    )
    packed_options.add_origin_options(parser, "its fingerprint says which model computed it")
    parser.add_argument(
        "--fingerprint",
        metavar="TEXT",
        help="which model computed it, where no --model tells; beside --model the engine's settings",
    )
    parser.add_argument(
        "--max-bytes",
        dest="store_bytes",  # of inputs other verbs have a bound
        type=shared_options.parse_byte_count,
        metavar="SIZE",
        help="put, import, gc: most bytes of all units (default: no bound)",
    )
    parser.add_argument(
        "--block-tokens", type=shared_options.parse_positive, metavar="N", help="of a store that is made (default: 64)"
    )
    parser.add_argument(
        "--codec",
        choices=("dense", "frames"),
        help="of a store that is made: dense streams where they are smaller (default), or frames",
    )
    dense_options.add_rope(parser)
    parser.add_argument(
        "--effort",
        choices=shared_options.EFFORT_CHOICES,
        default="fast",
        help="of frames: how hard to compress (default: fast, within 1%% of exact)",
    )
    parser.add_argument(
        "--threads", type=shared_options.parse_positive, metavar="N", help="threads (default: all processors)"
    )
    shared_options.add_output(parser, "get: file or directory; export: a file")
    parser.add_argument(
        "--capacity",
        type=shared_options.parse_positive,
        metavar="N",
        help="get: tokens that a prefix cache has room for",
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
    packed_options.add_packed_options(parser, with_text=False, with_undo=True)
    options = {
        name: (*action.options, *(["inputs"] if action.inputs else [])) for name, action in _SPEC_BY_ACTION.items()
    }
    help.narrow_help(parser, "action", options, _describe_action)


def _describe_action(action: str) -> str:
    """What the help of all says of one action."""
    title, _, body = _DESCRIPTION.partition("\n\n")
    lines = re.findall(rf"^  (?:\w+, )?{action}\b.*(?:\n {{10,}}.*)*", body, re.MULTILINE)
    about_texts = ["", body.rpartition("\n\n")[2]] if "token_ids" in _SPEC_BY_ACTION[action].options else []
    return "\n".join([title, "", *lines, *about_texts])


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out; with ``--json`` a failure has its document, too."""
    from ...errors import KvmnnError

    arguments.noted = []
    try:
        result, code = _run_action(arguments)
    except KvmnnError as error:
        if arguments.json:
            partial_document = _add_notes(getattr(arguments, "found", {}), arguments.noted)
            message = packed_options.adapt_message(arguments, str(error))
            printing.print_json({"verb": f"store {arguments.action}", **partial_document, "error": message})
        raise
    printing.show_result(arguments, f"store {arguments.action}", _ResultWithNotes(result, arguments.noted))
    return code


class _ResultWithNotes(NamedTuple):
    """A result whose document has the notes that went to standard error, too."""

    result: CommandResult
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return _add_notes(self.result.to_dict(), self.notes)

    def __str__(self) -> str:
        return str(self.result)


def _add_notes(document: dict[str, Any], new_notes: list[str]) -> dict[str, Any]:
    notes = list(dict.fromkeys([*document.get("notes", []), *new_notes]))
    return document | {"notes": notes} if notes else document


def _run_action(arguments: argparse.Namespace) -> tuple[CommandResult, int]:
    from ...files.urls import redact_url
    from ...store import PrefixStore, read_exported

    action = _SPEC_BY_ACTION[arguments.action]
    idle_names = [name for name in _ALL_OPTIONS if name not in action.options]
    idle_options.refuse_given(arguments, idle_names, f"says nothing to store {arguments.action}")
    if bool(arguments.inputs) != bool(action.inputs):
        expectation = f"needs {action.inputs}" if action.inputs else "takes nothing but the store"
        raise UsageError(f"store {arguments.action} {expectation}")
    if arguments.action == "import" and len(arguments.inputs) > 1:
        raise UsageError("store import takes one file")
    if "token_ids" in action.options and arguments.token_ids is None and arguments.action != "put":
        raise UsageError(f"store {arguments.action} needs --token-ids IDS")
    if "output" in action.options and arguments.output in (None, printing.STDIO):
        output_text = "FILE, a file of its own" if arguments.action == "export" else "OUT, a file or directory"
        raise UsageError(f"store {arguments.action} needs -o {output_text}")
    if arguments.store.startswith("memory://"):
        raise UsageError(f"{arguments.store}: is gone when this command ends: expected a place that stays")
    if arguments.codec == "frames":
        idle_options.refuse_given(arguments, ["rope"], "needs --codec dense")
    is_creating = arguments.action in _CREATING_ACTIONS
    if is_creating and arguments.store_bytes == 0:
        raise UsageError(f"store {arguments.action} --max-bytes 0: expected at least 1, or no bound")
    if is_creating:  # of an input that cannot be read no store is made
        if arguments.action == "import":
            arguments.read = read_exported(arguments.inputs[0])
        else:
            arguments.read = _load_source(arguments)
            arguments.made_by = _choose_put_model(arguments)
            arguments.layers = store_actions.read_layers(arguments.read, arguments)
    store = PrefixStore(
        arguments.store,
        arguments.store_bytes if is_creating else None,
        block_tokens=arguments.block_tokens,
        codec=arguments.codec,
        rotary=_read_rope(arguments) if is_creating else None,
        effort=arguments.effort,
        threads=arguments.threads,
        create=is_creating,
        read_only=arguments.action in _READ_ONLY_ACTIONS
        or (arguments.action in _READ_IF_POSSIBLE_ACTIONS and _is_unwritable(arguments.store)),
    )
    arguments.store = redact_url(arguments.store)  # messages name it
    with store:
        try:
            result_and_code: tuple[CommandResult, int] = store_actions.STORE_ACTIONS[arguments.action](store, arguments)
        finally:
            loading.report_notes(store.notes, arguments, "warning")
    return result_and_code


def _is_unwritable(store: str) -> bool:
    """Whether a store is a directory that cannot be written to."""
    return os.path.isdir(store) and not os.access(store, os.W_OK)


def _load_source(arguments: argparse.Namespace) -> Source:
    from ...arrays.own_order import to_common_order
    from ...store.state_arrays import extract_states

    source = extract_states(
        loading.load(arguments.inputs, arguments, with_frames=True, used_options=("model", "token_ids"))
    )
    loading.report_skipped(source, arguments)
    if store_actions.resolve_ids(source, arguments) is None:
        where = " ".join(arguments.inputs)
        if (cache := source.engine_cache) is not None and cache.texts:
            raise UsageError(f"{where}: is a batch of {cache.batch}: --batch N takes one text of it, from 0")
        raise UsageError(f"{where}: does not say its token ids: store put needs --token-ids IDS")
    source, notes = to_common_order(source)
    loading.report_notes(notes, arguments)
    return source


def _read_rope(arguments: argparse.Namespace) -> RopeConfig | Literal["none"] | None:
    """How K was rotated, as far as ``--rope`` or ``--model`` says it."""
    from ...errors import KvmnnError

    if arguments.rope is not None or arguments.model is None:
        specified: RopeConfig | Literal["none"] | None = arguments.rope
        return specified
    try:
        return dense_options.read_model_rope(arguments.model, arguments.read)[0]
    except KvmnnError:  # it says nothing: the store looks for it
        return None


def _choose_put_model(arguments: argparse.Namespace) -> str:
    """The model of what is put: as the options say, else as the cache itself does."""
    source = arguments.read
    model = store_actions.build_fingerprint(arguments)
    if model is None and source.cache:
        model = source.cache.model
    if model is None:
        raise UsageError(
            f"{' '.join(arguments.inputs)}: does not say which model computed it: --model or --fingerprint says it"
        )
    return model
