"""Chat templates of models: messages of a chat as the text that the model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._util.packages import import_optional
from ..errors import SourceError
from ..files.schema import parse_document, read_bounded
from .tokenizer import Tokenizer, encode_prompt, read_prompt_file

_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_MESSAGES_BYTES = 64 << 20


def is_chat_file(path: str) -> bool:
    """Return whether a text file is read as the messages of a chat."""
    return path.endswith(".json")


def read_prompt_ids(path: str, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the text of a file and its token ids: of a chat as the chat template of the model renders it.

    A text has the model's BOS token first; a template has its own. Errors as of `render_messages`.
    """
    text = read_prompt_file(path)
    if is_chat_file(path):
        return text, tokenizer.encode(render_messages(text, tokenizer.path.parent, path)).tolist()
    return text, encode_prompt(tokenizer, text)


def render_messages(document: str, model: Path, label: str) -> str:
    """Return the text of a chat, as the chat template of a model renders it, with the beginning of the answer.

    Parameters
    ----------
    document
        ``{"messages": [{"role": ..., "content": ...}, ...]}``.
    model
        Folder with ``chat_template.jinja``, or with ``tokenizer_config.json`` that has the template.
    label
        Name of the document in messages.

    Raises
    ------
    SourceError
        If there is no template, the document is no chat, or the template refuses it.
    MissingDependencyError
        If the package jinja2 is not installed.
    """
    nodes = parse_document(document, label, _MAX_MESSAGES_BYTES).get("messages").read_list(min_len=1)
    messages = [{name: node.get(name).read_str() for name in ("role", "content")} for node in nodes]
    jinja2, sandbox = import_optional("jinja2"), import_optional("jinja2.sandbox")

    def refuse(message: str) -> Any:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    special_tokens = _read_special_tokens(model)
    try:
        template = environment.from_string(_read_template(model))
        return str(
            template.render(messages=messages, add_generation_prompt=True, raise_exception=refuse, **special_tokens)
        )
    except (jinja2.TemplateError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise SourceError(f"{label}: the chat template of {model} fails: {error}") from None


def _read_template(model: Path) -> str:
    if (model / "chat_template.jinja").is_file():
        return read_bounded(model / "chat_template.jinja", _MAX_TEMPLATE_BYTES).decode()
    template = _read_config(model).get("chat_template")
    if not isinstance(template, str):
        raise SourceError(f"{model}: has no chat template: pass a text, not a .json of messages")
    return template


def _read_special_tokens(model: Path) -> dict[str, str]:
    """Return the special tokens that templates name."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = _read_config(model).get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_config(model: Path) -> dict[str, Any]:
    path = model / "tokenizer_config.json"
    if not path.is_file():
        return {}
    config: dict[str, Any] = parse_document(read_bounded(path, _MAX_MESSAGES_BYTES), str(path)).value
    return config
