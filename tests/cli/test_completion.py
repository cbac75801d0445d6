"""Completions and the manual page: generated from the parser, complete, and valid for their programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvmnn.cli import build_parser
from kvmnn.cli.command_parser import SUBCOMMANDS, TOP_COMMANDS
from kvmnn.cli.completion_scripts import describe_commands, format_bash

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "kvmnn.bash"
    path.write_text(format_bash(describe_commands(build_parser())))
    return path


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words of a command line."""
    listed = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _kvmnn; "
    done = subprocess.run([str(BASH), "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_bash_completes_verbs_and_options(script) -> None:
    assert completed(script, "kvmnn", "") == [*TOP_COMMANDS, "--help", "--version"]
    assert completed(script, "kvmnn", "com") == ["compressor", "completion"]
    assert completed(script, "kvmnn", "mnn", "") == [*SUBCOMMANDS["mnn"], "--help"]
    assert completed(script, "kvmnn", "compressor", "e") == ["export"]
    assert "--as-reference" in completed(script, "kvmnn", "compressor", "convert", "--as")
    assert completed(script, "kvmnn", "encode", "--effort", "") == ["exact", "balanced", "fast", "max"]
    assert completed(script, "kvmnn", "encode", "--no") == ["--no-verify", "--no-zstd"]
    assert "--ignore" in completed(script, "kvmnn", "mnn", "pack", "--i")  # of those that help folds away as well
    assert completed(script, "kvmnn", "mnn", "pack", "x", "--backend", "arm64-fp16") == [
        "arm64-fp16",
        "arm64-fp16-i8mm",
    ]
    assert completed(script, "kvmnn", "completion", "") == ["bash", "zsh", "fish", "man"]
    assert completed(script, "kvmnn", "generate", "--policy", "l2") == ["l2_ratio", "l2_fixed"]
    assert completed(script, "kvmnn", "eval", "--preset", "knorm-a") == ["knorm-ablation"]
    for files in (["encode", ""], ["encode", "-o", ""], ["encode", "x"], ["generate", "--tokenizer", ""]):
        assert completed(script, "kvmnn", *files) == []  # bash itself completes names of files then


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_verbs_and_options(run, tmp_path) -> None:
    (tmp_path / "script").write_text(run("completion", "fish").out)

    def offered(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source script; complete -C'{line}'"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert offered("kvmnn com") == ["completion", "compressor"]
    assert offered("kvmnn encode --effort ") == ["balanced", "exact", "fast", "max"]  # fish sorts
    assert offered("kvmnn encode --no-v") == ["--no-verify"]
    assert offered("kvmnn completion z") == ["zsh"]
    assert offered("kvmnn encode sc") == ["script"]


@pytest.mark.parametrize("form", ["bash", "zsh", "fish", "man"])
def test_completion_has_all_verbs_and_options(form, run) -> None:
    text = run("completion", form).out.replace("\\-", "-")
    for verb in describe_commands(build_parser()):
        assert verb.name in text if form != "fish" else all(word in text for word in verb.name.split())
        for option in verb.options:
            for name in option.names:
                assert (name if form != "fish" else f"-{'l' if name[:2] == '--' else 's'} {name.lstrip('-')}") in text
            if form != "man" or option.value != "SPEC":  # where the page does not list what a value begins with
                assert all(choice in text for choice in option.choices)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_parses_in_its_shell(shell, run, tmp_path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    path = tmp_path / "script"
    path.write_text(run("completion", shell).out)
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_manual_page_is_valid_roff(run, tmp_path) -> None:
    page = run("completion", "man").out
    macros = {line.split()[0] for line in page.splitlines() if line.startswith(".")}
    assert macros == {".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".I", ".nf", ".fi", ".RS", ".RE"}
    assert not [line for line in page.splitlines() if line.startswith("'")]
    if shutil.which("groff"):
        (tmp_path / "kvmnn.1").write_text(page)
        argv = ["groff", "-man", "-Tascii", "-ww", "-z", str(tmp_path / "kvmnn.1")]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_describe_commands_only_valued_options_name_a_value() -> None:
    (replay,) = (verb for verb in describe_commands(build_parser()) if verb.name == "mnn replay")
    values = {name: option.value for option in replay.options for name in option.names}
    assert (values["--json"], values["--token-major"], values["--prefill-tokens"], values["--engine-config"]) == (
        "",
        "",
        "N",
        "FILE",
    )


def test_completion_unknown_shell_is_refused(run) -> None:
    assert "did you mean 'fish'" in run("completion", "fsh", code=2).err
    assert "required: SHELL" in run("completion", code=2).err
