"""Scripts are followed as bash would run them, without running them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError
from megatron_core.shell.interpreter import Interpreter
from megatron_core.shell.unknown import UNKNOWN, readable
from tests.shell.scripts import SCRIPTS as MORE
from tests.shell.scripts import every_arithmetic, every_expansion

BASH = shutil.which("bash")
# ruff: noqa: E501 (scripts in one line)
SCRIPTS = {
    "continuation": "train --a 1 \\\n  --b '2 3' \\\n  --c \"x y\" # comment\ntrain --d",
    "defaults": 'A=${1:-small}\nB=${A}-${2-none}\n: ${C:=7}\ntrain "$A" ${B} $C ${D:+set} ${A:+set}',
    "arrays": 'X=(\n  --a 1 # one\n  --b "two words"\n)\nX+=(--c)\nY=("${X[@]}" --d)\ntrain "${Y[@]}" ${#Y[@]} ${X[1]} $X',
    "unquoted": 'O=" --a 1\n --b 2 "\nO="$O --c"\nO+=" --d"\ntrain $O "$O"',
    "numbers": "N=4\nG=$((N * 8 / 3 - 1))\n((G++))\nlet H=G*2\ntrain $G $H $(( G > 5 ? 1 : 0 ))0 $((010 == 8))",
    "if": 'M=7B\nif [ $M = 1B ]; then L=1\nelif [[ $M == 7* && -n "$M" ]]; then L=32\nelse L=0; fi\ntrain $L',
    "not if": 'if ! [ -z "$NOTHING" ] || [[ a != a ]]; then train 1; else train 2; fi; [ 3 -gt 2 ] && train 3 || train 4',
    "case": 'for M in 7B 13B x; do\ncase $M in\n 7B|8B) L=32;;\n 13*) L=40 ;;\n *) L=0\nesac\ntrain $L\ndone',
    "function": 'run() {\n local n=$1; shift\n train $n "$@"\n}\nfunction two { run 2 "$@"; return; train no; }\nrun 1 a b; two "c d"',
    "arguments": 'while [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2;; *) R="$R $1"\nshift;; esac; done\ntrain $N$R',
    "texts": 'P=/a/b/c.tar.gz\ntrain ${P##*/} ${P%.*} ${P%%.*} ${P#/a} ${P/b/x} ${P//a/A} ${#P} ${P:3:2} ${P^^}',
    "commands": 'D=$(dirname "/a/b.sh")\ntrain $D `basename /x/y.sh .sh` $(seq 3) $(expr 2 + 3) $(echo "a  b")',
    "folder": 'D="$( cd -- "$(dirname -- "/tmp/../tmp/x.sh")" &>/dev/null && pwd )"\ntrain $D $(basename -- /a/b)',
    "printf": 'A=(1 2 3)\nprintf -v L "[%s]" "$(IFS=", "; echo "${A[*]}")"\ntrain "$L" "${A[*]}" "$(printf "%s-%d\\n" a 1 b 2)"',
    "tabs": 'A=$(printf "%s\\t%s" a b); printf -v B "%s" ""\ntrain "$A" "[$B]"',
    "separators": 'O=$IFS; IFS=,; A=(1 2); IFS=$O; F="${A[*]}"; f() { local IFS=,; echo "${A[*]}"; }\ntrain $F $(f) "${A[*]}"',
    "for one command": 'A=1; N=(x y); A=2 eval "train \\$A"; IFS=, read -r B <<< "1,2"; train $A "${N[*]}"',
    "no arrays": 'A=(--a)\ntrain ${A[@]} ${B[@]} "${C[@]}" end',
    "subshell": 'A=1\nB=$(A=2; echo $A)\ntrain $A $B',
    "eval": 'O="--a 1"\ncmd="train $O --b \'2 3\'"\neval $cmd\neval "$cmd"',
    "heredoc": "cat <<EOF > f\ntrain no $X\nEOF\ntrain yes 2>&1 >/dev/null",
    "counting": "for ((i = 0; i < 3; i++)); do train $i; done\ni=5\nuntil [ $i -eq 3 ]; do i=$((i - 1)); done; train $i",
    "map": 'declare -A M=([small]=12 ["large"]=96)\nk=large\ntrain ${M[$k]} ${M[small]}',
    "indirect": 'NAME=N; N=3; export Q=4; readonly S="5 6"\ntrain ${!NAME} $Q "$S" $S',
    "group": '{ train 1; } && ( A=2; train $A ); ! false && train 3; true; echo "train no" | cat',
    "break": "for i in 1 2 3; do if [ $i = 2 ]; then continue; fi; if (( i == 3 )); then break; fi; train $i; done",
    "empty": 'A=(); E=""\ntrain "${A[@]}" ${A[@]} "$E" $E end ""',
    "escapes": "train a\\ b \\$x \"\\$y \\\"q\\\"\" '$z' $'t\\tu' a\\\nb",
    "unset": 'X=1; unset X; set -- p q\ntrain ${X-gone} $# "$*" $2',
}  # fmt: skip
ARGUMENTS = {"arguments": ["--n", "5", "rest"], "getopts": ["-a", "1 2", "-bc", "x", "rest", "-b"]}


def followed(text: str, arguments: list[str]) -> list[list[str]]:
    found = Interpreter.of(text, "script.sh", arguments, {})
    return [list(each.words[1:]) for each in found.commands if each.words[0] == "train"]


def run_by_bash(text: str, arguments: list[str], folder: Path) -> list[list[str]]:
    """The arguments of each call of ``train`` by bash."""
    printing = 'train() { printf "%s\\0" "$#" "$@" >&3; }\n'
    (folder / "script").write_text(f"exec 3>{folder}/words\n{printing}{text}")
    done = subprocess.run(
        [str(BASH), f"{folder}/script", *arguments],
        cwd=folder, check=False, capture_output=True, stdin=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    words, found = (folder / "words").read_text().split("\0")[:-1], []
    while words:
        count = int(words[0])
        found.append(words[1 : count + 1])
        words = words[count + 1 :]
    assert found, done.stderr
    return found


@pytest.mark.every_case
@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_programs_get_the_arguments_that_bash_gives_them(name: str, tmp_path: Path) -> None:
    text, arguments = (SCRIPTS | MORE)[name], ARGUMENTS.get(name, [])
    assert followed(text, arguments) == run_by_bash(text, arguments, tmp_path)


@pytest.mark.every_case
@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("script", [every_expansion, every_arithmetic])
def test_every_combination_is_that_of_bash(script: Callable[[], str], tmp_path: Path) -> None:
    for at, (found, expected) in enumerate(
        zip(followed(script(), []), run_by_bash(script(), [], tmp_path), strict=True)
    ):
        assert found == expected, at


def test_arrays_that_may_be_set_are_not_empty() -> None:
    for text in ("if [ -f y ]; then A=(--swiglu); fi", "mapfile -t A < f", 'eval "$(settings)"'):
        (words,) = followed(f'{text}\ntrain "${{A[@]}}"', [])
        assert readable(words[0]) == "<A>", text


def test_scripts_are_those_that_bash_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a relative path, from another folder; a function belongs to the file that defines it."""
    (tmp_path / "jobs" / "lib").mkdir(parents=True)
    (tmp_path / "jobs" / "size").write_text("N=wrong\n")
    (tmp_path / "jobs" / "lib" / "size").write_text("N=right\n")
    of_file = 'source "$(cd "$(dirname "{}")" && pwd)/size"'
    (tmp_path / "jobs" / "lib" / "f.sh").write_text(f"f() {{ {of_file.format('${BASH_SOURCE[0]}')}; train $N; }}\n")
    (tmp_path / "jobs" / "lib" / "child.sh").write_text(f"{of_file.format('$0')}; train $N\n")
    text = 'bash "$(dirname "$0")/lib/child.sh"; source "$(dirname "$0")/lib/f.sh"; f'
    (tmp_path / "jobs" / "run.sh").write_text(text)
    monkeypatch.chdir(tmp_path)
    for script in ("jobs/run.sh", str(tmp_path / "jobs" / "run.sh")):
        found = Interpreter.of(text, script, [], {})
        assert [each.words[-1] for each in found.commands if each.words[0] == "train"] == ["right", "right"]
        assert not found.notes


def test_files_outside_the_folders_of_the_script_are_not_read_in_place_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "jobs"
    folder.mkdir(parents=True)
    (tmp_path / "project" / "sizes").mkdir()
    (tmp_path / "project" / "sizes" / "7b.sh").write_text("N=7\n")
    (tmp_path / "other.sh").write_text("N=9\n")
    long = "a" * 300
    text = f"source /data/project/sizes/7b.sh; source /data/x/../../other.sh; source /data/{long}/{long}; train $N"
    found = Interpreter.of(text, str(folder / "run.sh"), [], {})
    assert found.commands[0].words == ("train", "7")
    notes = list(found.notes)
    assert len(notes) == 3 and "7b.sh is read in its place" in notes[0]
    assert all(note.endswith("is not on this machine, so its variables are unknown") for note in notes[1:])


def test_nothing_is_run(tmp_path: Path) -> None:
    text = f"touch {tmp_path}/a; X=$(touch {tmp_path}/b); bash -c 'touch {tmp_path}/c'; echo > {tmp_path}/d"
    found = Interpreter.of(text, "s", [], {})
    assert list(tmp_path.iterdir()) == []
    assert [each.words[0] for each in found.commands] == ["touch", "bash", "touch"]


def test_what_is_not_known_has_a_name() -> None:
    found = Interpreter.of(
        'H=$(hostname -i)\ntrain $H $1 $DATA "${X:?}"\n[ -f y ] && train 1\nif test $H = a; then train 2; fi',
        "s",
        [],
        {},
    )
    words = [[readable(word) for word in each.words] for each in found.commands]
    assert words == [
        ["train", "<output-of-hostname>", "<argument-1>", "<DATA>", "<X>"],
        ["train", "1"],
    ]
    assert list(found.variables.unset) == ["1", "DATA", "X"]
    assert list(found.notes) == ["s line 4: this condition is not known, and is taken as false"]


def test_other_scripts_and_variables(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("export LAYERS=$((SIZE * 2))\n")
    (tmp_path / "inner.sh").write_text("train $1 $LAYERS\n")
    script = tmp_path / "run.sh"
    script.write_text(
        'F="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$F/model.sh"\n. $(dirname $0)/absent.sh\nbash "inner.sh" x\nsbatch <<E\ntrain $LAYERS\nE\n'
    )
    found = Interpreter.of(script.read_text(), str(script), [], {"SIZE": "4"})
    assert [each.words[1:] for each in found.commands if each.words[0] == "train"] == [("x", "8"), ("8",)]
    assert any("absent.sh is not on this machine" in note for note in found.notes)
    # A path on the machine of the script is found in the script's own copy of the folder.
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text("LAYERS=2\n")
    text = "source /data/code/models/small.sh\ntrain $LAYERS ${NONE[@]}\n. /absent.sh\ntrain ${NONE[@]}"
    found = Interpreter.of(text, str(tmp_path / "run" / "x.sh"), [], {})
    assert [[readable(word) for word in each.words[1:]] for each in found.commands] == [["2"], ["<NONE>"]]
    assert any("/models/small.sh is read in its place" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train 'a", "line 1: the end of the quotation"),
        ("a\nb $(c", "line 2: the end of the quotation"),
        ("if true; then x", "ends before elif or else or fi"),
        ("fi", "unexpected fi"),
        ("for x in 1 2; x; done", "has no do"),
        ("f() { f; }; f", "nested deeper"),
        ("{ " * 200, "nested too deeply"),
        ("x=aaaaaaaaaa; for ((;;)); do x=$x$x; done", "more than 1000000 characters"),
        ("while true; do for ((i=0;i<900;i++)); do :; done; done", "steps"),
        ("shift " + 5000 * "9", "number of too many digits"),
    ],
)
def test_scripts_that_cannot_be_followed(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Interpreter.of(text, "script.sh", [], {})


def test_a_wide_value_of_printf_is_not_known() -> None:
    """A script of a few characters must not fill the memory."""
    found = Interpreter.of("train $(printf '%1000000000d' 3) $(printf '%5d' 3)", "script.sh", [], {})
    (command,) = found.commands
    assert UNKNOWN.search(command.words[1]) and command.words[2] == "3"


def test_variables_of_branches_that_are_not_followed() -> None:
    """They are empty if the condition is known, and otherwise not known."""
    found = Interpreter.of(
        "OFFLOAD=false; TP=4\n"
        'if [ $OFFLOAD != false ]; then offload="--offload"; fi\n'
        "case $1 in a) model=--a;; esac\n"
        "if [ $SIZE = 7B ]; then LAYERS=32; fi\n"
        "case $TP in 2) two=1;; esac\n"
        'if [ "$SIZE" = 2 ] || { if false; then x=1; fi; false; }; then nested=4; fi\n'
        'train $offload "$offload" $model $LAYERS $nested $((two + 1)) $(( ($TP > 1) ? 5 : 6 ))',
        "s",
        [],
        {},
    )
    (launch,) = found.commands
    assert [readable(word) for word in launch.words] == ["train", "", "<model>", "<LAYERS>", "<nested>", "1", "5"]
