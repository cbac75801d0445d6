"""``kvmnn generate``: text from a model under a policy beside that of the full cache."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, LOSSY
from .. import model_run, printing, shared_options
from ..printing import STDIO, UsageError

if TYPE_CHECKING:
    from ...evaluation.setup.configurations import Configuration
    from ...lm.generation import Generation, Sampling
    from ...lm.session import DecoderSession
    from ...lm.tokenizer import Tokenizer

_TEXT = f"""Continue a prompt with a model whose KV cache is under a policy, and beside it with the full cache: where
the two texts part, what was kept, what a token took. Greedy by default, so that every difference is the policy's.

{model_run.EPILOG}"""

_MAX_PROMPT = 64 << 20


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "generate", run, "text under a policy beside that of the full cache", _TEXT)
    model_run.add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with it; - is standard input")
    parser.add_argument(
        "--max-tokens", type=shared_options.positive, default=64, metavar="N", help="new tokens (default: 64)"
    )
    parser.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="draw tokens (default: 0)")
    parser.add_argument("--top-k", type=shared_options.positive, metavar="K", help="draw from the K most probable only")


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...lm.generation import Sampling, continuation, first_difference

    if arguments.top_k is not None and arguments.temperature == 0:
        raise UsageError("--top-k needs a --temperature above 0")
    chosen = model_run.configuration(arguments)
    prompt = _prompt(arguments)
    session, tokenizer = model_run.open_model(arguments, chosen)
    sampling = Sampling(temperature=arguments.temperature, top_k=arguments.top_k, seed=arguments.seed)
    ids = model_run.with_bos(tokenizer, prompt).tolist()
    made = _generate_all(arguments, session, tokenizer, chosen, ids, sampling)
    texts = {label: continuation(tokenizer, ids, one.ids) for label, one in made.items()}
    whole, cut = made["full"], made[chosen.label]
    parting = None if chosen.label == "full" else first_difference(whole.ids, cut.ids)
    if arguments.json:
        printing.print_json(
            {
                "verb": "generate",
                "model": arguments.model,
                "label": _label(cut),
                "policy": chosen.to_dict(),
                "prompt": prompt,
                "prompt_tokens": len(ids),
                "first_difference": parting,
                "equal": parting is None,
                "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": sampling.seed},
                "full": {**whole.to_dict(), "text": texts["full"]},
                "cut": None if chosen.label == "full" else {**cut.to_dict(), "text": texts[chosen.label]},
            }
        )
    printing.say(arguments, _shown(made, texts, chosen.label, parting))
    return 0


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, at least 0")
    return value


def _prompt(arguments: argparse.Namespace) -> str:
    from ...errors import SourceError
    from ...files.mapped import MappedFile

    if arguments.prompt is not None:
        data, where = arguments.prompt.encode("utf-8", "surrogateescape"), "--prompt"
    else:
        where = "standard input" if arguments.prompt_file == STDIO else arguments.prompt_file
        file = MappedFile(arguments.prompt_file)
        if file.size > _MAX_PROMPT:
            raise SourceError(f"{where}: {file.size:,} bytes are too many for a prompt")
        data = file.head(file.size)
    try:
        return str(data.decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise SourceError(f"{where}: is not UTF-8: byte {exc.start} is 0x{data[exc.start]:02x}") from None


def _generate_all(
    arguments: argparse.Namespace,
    session: DecoderSession,
    tokenizer: Tokenizer,
    chosen: Configuration,
    ids: list[int],
    sampling: Sampling,
) -> dict[str, Generation]:
    """With the full cache, and under the policy if there is one."""
    from ...lm.generation import ending_tokens, generate, warm_up
    from ...lm.graph.model_files import find_model

    ends = ending_tokens(find_model(arguments.model))
    warm_up(session, ids[0])
    made = {}
    for configuration in [None] if chosen.label == "full" else [None, chosen]:
        label = "full" if configuration is None else configuration.label
        with model_run.token_progress(arguments, arguments.max_tokens, label) as step:
            made[label] = generate(
                model_run.runner(arguments, session, configuration),
                ids,
                arguments.max_tokens,
                sampling=sampling,
                ends=ends,
                chunk=arguments.chunk,
                progress=step,
            )
    return made


def _shown(made: dict[str, Generation], texts: dict[str, str], label: str, parting: int | None) -> str:
    from ..side_by_side import side_by_side, wrapped

    width = shutil.get_terminal_size((100, 24)).columns
    if label == "full":
        return "\n".join([*wrapped(texts["full"], width), "", *_numbers(made, width)])
    both = side_by_side(("full cache", texts["full"]), (f"{_label(made[label])}: {label}", texts[label]), width)
    if parting is None:
        what = f"equal: all {len(made['full'].ids):,} new tokens"
    else:
        what = f"equal up to new token {parting:,}, different from {parting + 1:,} of {len(made['full'].ids):,} on"
    return "\n".join([both, "", what, *_numbers(made, width)])


def _numbers(made: dict[str, Generation], width: int) -> list[str]:
    """Aligned lines of what each run took."""
    rows: list[tuple[str, Callable[[str, Generation], str]]] = [
        ("", lambda label, one: label),
        ("new tokens", lambda label, one: f"{len(one.ids):,} ({one.stopped})"),
        ("tokens kept of seen", lambda label, one: f"{_range(one.tokens_kept)} of {one.tokens_seen:,}"),
        ("K and V held", lambda label, one: f"{one.cache_bytes / (1 << 20):.2f} MiB"),
        ("first token after", lambda label, one: f"{1e3 * one.prompt_seconds:.1f} ms"),
        ("time per token", lambda label, one: _milliseconds(one.token_seconds)),
        ("  in the model", lambda label, one: _milliseconds(one.model_seconds)),
        ("  in the policy", lambda label, one: _milliseconds(one.policy_seconds)),
    ]
    cells = [[heading, *(text(label, one) for label, one in made.items())] for heading, text in rows]
    sizes = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return ["  ".join(text.ljust(size) for text, size in zip(line, sizes, strict=True)).rstrip() for line in cells]


def _label(one: Generation) -> str:
    """Whether the cache lost anything."""
    return LOSSY if min(one.tokens_kept) < one.tokens_seen else LOSSLESS


def _range(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f} ms"
