"""Scripts that try to run, read or keep more than a launch needs."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Thread

import pytest

from megatron_core.commands.from_megatron import main
from megatron_core.errors import ConfigError
from megatron_core.shell.interpreter import Interpreter
from megatron_core.shell.limits import limited_time
from megatron_core.shell.unknown import UNKNOWN, readable

MANY = "printf -v x %9999s a; x=${x// /a}; "
FILE = "printf -v y '%999s' a; y=${y// /a}; echo $y$y$y > f; "
LONG = "x=" + 40 * "a" + "b; "
FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --mock-data --vocab-size 64 --train-iters 2"


def followed(text: str, script: str = "s.sh") -> Interpreter:
    return Interpreter.of(text, script, [], {})


@pytest.mark.parametrize(
    "text",
    [
        LONG + "[[ $x =~ ^(a+)+$ ]]",
        LONG + "[[ $x =~ (a|a)*c ]]",
        LONG + "[[ $x == +(+(a)) ]]",
        LONG + "case $x in *a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*c) ;; esac",
        LONG + "y=${x//+(+(a))c/}",
        LONG + "y=${x%%*(*(a))c}",
        "; ".join(f"a{n}='a{n + 1}+a{n + 1}'" for n in range(18)) + "; a18=1; train $((a0))",
        "x='eval $x$x'; eval $x",
        "train " + 20_000 * "{",
        "train " + 20_000 * "(",
        "[[ x == " + 20_000 * "[" + " ]]",
    ],
)
def test_the_time_is_limited(text: str) -> None:
    """Also within a regular expression; neither a thread nor a timer remains."""
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ConfigError, match=r"s.sh: following it takes more than 0.1 s"), limited_time("s.sh", 0.1):
        followed(text)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_another_thread_has_no_limit_of_time() -> None:
    """Signals are handled in the main thread only."""
    found = list[int]()

    def follow() -> None:
        with limited_time("s.sh", 0.001):
            found.append(len(followed("train x").commands))

    thread = Thread(target=follow)
    thread.start()
    thread.join()
    assert found == [1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x=aaaaaaaaaa; for ((;;)); do x=$x$x; done", "the value of x|a word"),
        (MANY + 'A=("$x" "$x"); for ((;;)); do A=("${A[@]}" "${A[@]}"); done', "list of words"),
        (MANY + 'set -- "$x" "$x"; for ((;;)); do set -- "$@" "$@"; done', "list of words"),
        ('f() { f "$@" "$@"; }; f ' + 1000 * "aaaaaaaaaaaaaaaa ", "list of words"),
        ("x=$(for i in {1..999}; do for j in {1..90}; do printf %9999d 1; done; done)", "all values together"),
        ("printf -v x %0999999d 0; for i in {1..999}; do declare v$i=$x; done; train x", ""),
        (MANY + 'x=$x$x$x$x$x; for i in {1..999}; do train "$x" "$x"; done', "all values together"),
        (MANY + "x=$x$x$x$x; y=${x//a/$x}", "replaced parts"),
        ("printf -v x %9999s%9999s {1..1000}", "printf"),
        ("train {1..1000}" + 2000 * "a", "brace expression"),
        (":(){ :|:& };:", "nested deeper"),
        ("f() { x=$(f); }; f", "nested deeper"),
        ("f() { f; f; }; f", "nested deeper"),
        (FILE + "x=${y//a/f }; cat $x", "a list of files"),
        (FILE + "sed s/a/$y$y$y$y$y$y$y$y$y$y/g f", "the output of sed"),
        ("x=" + 3000 * "$(" + 3000 * ")", "nested too deeply"),
        ("train $((" + 3000 * "(" + "1" + 3000 * ")" + "))", "nested too deeply"),
        ("[[ " + 3000 * "! " + "x ]]", "nested too deeply"),
        ("train " + 1000 * "{a," + 1000 * "}", "nested too deeply"),
    ],
)
def test_memory_and_nesting_are_limited(text: str, said: str) -> None:
    if not said:  # a value of this width is not known, so that its copies are short
        assert len(followed(text).commands) == 1
        return
    with pytest.raises(ConfigError, match=said):
        followed(text)


def test_expressions_are_cut() -> None:
    found = followed(
        "train {1..1000}{1..1000}; train {{1..1000},{1..1000}}; train $((9**9**9)) {1..99999999999999999999}"
    )
    assert [len(each.words) for each in found.commands] == [1001, 1001, 1002]
    assert found.commands[2].words[1] == str((pow(9, 9**9, 2**64) + 2**63) % 2**64 - 2**63)  # as in bash


def test_nothing_is_run_in_any_place(tmp_path: Path) -> None:
    touch = f"touch {tmp_path}/a"
    text = (
        f"x=$((a[$({touch})])); `{touch}`; eval '{touch}'; train <({touch}) >({touch}); y=${{x:-$({touch})}}\n"
        f"cat <<E\n$({touch})\nE\n[[ -v a[$({touch})] ]]; trap '{touch}' EXIT; coproc {touch}; . <(echo {touch})\n"
        f"declare -n r='a[$({touch})]'; echo ${{r}} ${{!r}} > {tmp_path}/b; exec 3<> {tmp_path}/c; mkdir {tmp_path}/d"
    )
    followed(text)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a secret, and in it a project with a folder of jobs, which is the current one."""
    home = tmp_path / "home"
    jobs = home / "code" / "project" / "jobs"
    jobs.mkdir(parents=True)
    (home / ".env").write_text("KEY=secret\n")
    (home / "code" / "project" / "env.sh").write_text("LAYERS=4\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(jobs)
    return jobs


@pytest.mark.parametrize("name", ["~/.env", "../../../.env", "link.sh", "$PWD/../../../.env", "/proc/self/environ"])
def test_files_outside_are_not_read(name: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their values would be in the report; a link does not help. --read-from allows a folder."""
    (project / "link.sh").symlink_to(project.parents[2] / ".env")
    home = str(project.parents[2])
    script = project / "run.sh"
    script.write_text(f"source ../env.sh; source {name}\npython pretrain_gpt.py {FLAGS} --save /x/$KEY/$LAYERS\n")
    words = ["--set", f"HOME={home}", "--set", f"PWD={project}", str(script)]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "secret" not in text and "save /x/<KEY>/4" in text
    assert "is outside the folders of the script, and is not read; --read-from allows it" in text
    if "proc" not in name:
        assert main(["--read-from", home, *words]) == 0
        assert "save /x/secret/4" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("flag", ["--config", "--export-kd-cfg", "--heterogeneous-layers-config-path"])
def test_files_of_settings_outside_are_not_read(flag: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages about a wrong file may quote it."""
    script = project / "run.sh"
    for name in (project.parents[2] / ".env", Path("/dev/stdin")):
        script.write_text(f"python pretrain_gpt.py {FLAGS} {flag}={name}\n")
        assert main([str(script)]) == 1
        text = " ".join(capsys.readouterr().out.split())
        assert "outside the folders of the script, or is not a file, and is not read" in text
        assert "secret" not in text and "KEY" not in text


def test_contents_of_files_are_not_values(project: Path) -> None:
    """Neither input from a file nor a pattern of file names reads the disk."""
    (project / "a.txt").write_text("secret\n")
    text = "x=$(< a.txt); y=$(cat a.txt); mapfile L < a.txt; read z < a.txt; train $x $y $z ${L[0]} *.txt"
    (words,) = (each.words for each in followed(text).commands if each.words[0] == "train")
    assert not any("secret" in word for word in words) and words[-1] == "*.txt"
    assert all(UNKNOWN.search(word) for word in words[1:-1])


def test_a_script_that_submits_itself_is_followed_once(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("if [ -z $SLURM_JOB_ID ]; then sbatch $0; exit; fi\nsbatch --begin=now+1day run.sh\ntrain x\n")
    found = Interpreter.of(script.read_text(), str(script), [], {})
    assert [each.words[0] for each in found.commands] == ["sbatch", "sbatch", "train"]
    assert any("starts itself, and is followed once" in note for note in found.notes)


def test_a_report_has_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal would execute them."""
    script = tmp_path / "run.sh"
    script.write_text(f"python $'x\\e]0;title\\a/pretrain_gpt.py' {FLAGS} --save $'\\e[2J'\n")
    main([str(script)])
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\a" not in text and "\\x1b[2J" in text


def test_names_of_files_may_have_any_characters() -> None:
    found = followed("source $'a\\x00b'; bash $(printf 'a%.0s' {1..900}).sh; train x")
    assert [readable(each.words[0]) for each in found.commands] == ["bash", "train"]
