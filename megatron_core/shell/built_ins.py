"""Built-in commands of bash that only use variables, input and output."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_core.shell.assignment import assign_text, assign_word
from megatron_core.shell.conditions import holds
from megatron_core.shell.fields import Fields
from megatron_core.shell.files import SETTINGS, is_open, text_of_settings, values_of
from megatron_core.shell.limits import join_texts, require_size
from megatron_core.shell.patterns import unescaped
from megatron_core.shell.programs import printed
from megatron_core.shell.state import ShellState
from megatron_core.shell.tokens import ASSIGNMENT
from megatron_core.shell.tree import Command
from megatron_core.shell.unknown import UNKNOWN, unknown


class Jump(Exception):
    """``return``, ``break``, ``continue`` or ``exit``, with its number; None if it is not known."""

    def __init__(self, command: str, number: int | None) -> None:
        super().__init__(command)
        self.command = command
        self.number = number


class ReturnStatus(Exception):
    """The number that ``return`` gives a function."""

    def __init__(self, number: int | None) -> None:
        super().__init__(number)
        self.number = number


def lines_of(text: str) -> list[str]:
    """Lines with their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


@dataclass
class BuiltIns(ShellState):
    """Built-in commands; ``_do_NAME`` returns the success, or None if it is not known."""

    def _do_echo(self, words: list[str]) -> bool:
        remainder = words[1:]
        options = ""
        while remainder and re.fullmatch("-[neE]+", remainder[0]):
            options += remainder.pop(0)
        text = " ".join(remainder)
        self._print((unescaped(text) if "e" in options else text) + ("" if "n" in options else "\n"))
        return True

    def _do_cd(self, words: list[str]) -> bool:
        to = [word for word in words[1:] if not word.startswith("-") or word == "-"]
        old = self.variables.values.get("OLDPWD", "")
        before = self._folder
        if to == ["-"] and isinstance(old, str):
            self._folder = old
        else:
            self._folder = os.path.join(before, to[0]) if to else ""
        self.variables.assign("OLDPWD", before)
        if self._folder:
            self.variables.assign("PWD", self._current_folder("PWD"))
        return True

    def _current_folder(self, name: str) -> str:
        is_known = self._folder and not UNKNOWN.search(self._folder)
        return os.path.abspath(self._folder) if is_known else unknown(name)

    def _do_pwd(self, words: list[str]) -> bool:
        self._print(self._current_folder("output-of-pwd") + "\n")
        return True

    def _do_printf(self, words: list[str]) -> bool:
        if words[1:2] == ["-v"] and len(words) > 3:
            self.variables.assign(words[2], printed(["printf", *words[3:]], words[2]))
        else:
            self._print(printed([word for word in words if word != "--"], "output-of-printf"))
        return True

    def _do_test(self, words: list[str]) -> bool | None:
        return holds(words[1:-1] if words[0] == "[" else words[1:], self.variables, is_double=False)

    def _do_true(self, words: list[str]) -> bool:
        return words[0] != "false"

    def _do_shift(self, words: list[str]) -> bool:
        count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
        if count > len(self.variables.arguments):
            return False
        self.variables.arguments = self.variables.arguments[count:]
        return True

    def _do_set(self, words: list[str]) -> bool:
        remainder = words[1:]
        while remainder and re.match(r"[-+]", remainder[0]):
            option = remainder.pop(0)
            if option == "--":
                self.variables.arguments = remainder
                return True
            if option.endswith("o"):
                remainder = remainder[1:]
        if remainder:
            self.variables.arguments = remainder
        return True

    def _do_unset(self, words: list[str]) -> bool:
        for word in words[1:]:
            name, _, index = word.rstrip("]").partition("[")
            value = self.variables.values.get(name)
            if index and isinstance(value, dict):
                self.variables.values[name] = {key: word for key, word in value.items() if key != index}
            elif index and isinstance(value, list):
                position = self.variables.arithmetic(index)
                self.variables.values[name] = [word for number, word in enumerate(value) if str(number) != position]
            else:
                self.variables.values.pop(name, None)
        return True

    def _do_let(self, words: list[str]) -> bool | None:
        value = [self.variables.arithmetic(word) for word in words[1:]][-1:] or ["0"]
        return None if UNKNOWN.search(value[0]) else value[0] != "0"

    def _do_cat(self, words: list[str]) -> bool | None:
        text = self._text_of([word for word in words[1:] if word != "-"])
        self._print(unknown("output-of-cat") if text is None else text)
        return None if text is None else True

    def _text_of(self, names: list[str]) -> str | None:
        """The text of files, or of standard input without ``names``; None if it is not known."""
        if not names:
            return None if self._input is None else "".join(self._input)
        return join_texts(map(self.text_of_file, names), "a list of files")

    def text_of_file(self, name: str) -> str | None:
        """The text of a file that the script has written, or of a JSON file near it; None if it is not known."""
        path = os.path.normpath(name)
        return self.files[path] if path in self.files else text_of_settings(self._script, name, self._folders)

    def _command_of(self, words: list[str], line: int) -> Command:
        """A program that starts now, with the files in its flags."""
        names = values_of(words, "deepspeed-config")
        settings = values_of(words, *SETTINGS)
        text = self.text_of_file(names[-1]) if names else None
        self.variables.spend(len(text or ""))
        closed = tuple(name for name in settings if not is_open(name, self._folders))
        return Command(tuple(words), str(self._script), line, self._launcher, text, closed)

    def _write(self, name: str, text: str, appends: bool = False) -> None:
        before = self.text_of_file(name) or "" if appends else ""
        self.variables.spend(len(before))
        self.files[os.path.normpath(name)] = before + text

    def _do_sed(self, words: list[str]) -> bool | None:
        """Replace words, as in ``sed s/NAME/value/``; the output of other edits is not known."""
        in_place = "-i" in words[1:2]
        words = words[:1] + words[2:] if in_place else words
        scripts = words[1:2]
        names = words[2:]
        if words[1:2] == ["-e"]:
            scripts = words[2::2]
            names = []
        if in_place:
            return self._edit_files(scripts, names)
        edited = self._edited(scripts, names)
        self._print(unknown("output-of-sed") if edited is None else edited)
        return None if edited is None else True

    def _edit_files(self, scripts: list[str], names: list[str]) -> bool | None:
        """Follow ``sed -i``."""
        texts = {name: self._edited(scripts, [name]) for name in names}
        for name, text in texts.items():
            self._write(name, unknown("output-of-sed") if text is None else text)
        return None if not names or None in texts.values() else True

    def _do_cp(self, words: list[str]) -> bool | None:
        """Follow the copy of a file to another name; the text of other copies is not known."""
        names = [word for word in words[1:] if not word.startswith("-")]
        text = self.text_of_file(names[0]) if len(names) == 2 else None
        for name in names[-1:]:
            self._write(name, unknown("output-of-cp") if text is None else text)
        return None if text is None else True

    def _edited(self, scripts: list[str], names: list[str]) -> str | None:
        """The output of sed; None if it is not known."""
        edits = [re.fullmatch(r"s([/|,#])(\w+)\1([^\\&]*)\1(g?)", word) for word in scripts]
        text = self._text_of(names)
        if text is None or not all(edits) or any(word.startswith("-") for word in names):
            return None
        for _, old, new, every in (edit.groups() for edit in edits if edit is not None):
            lines = lines_of(text)
            places = [line.count(old) if every else int(old in line) for line in lines]
            require_size(len(text) + sum(places) * len(new), "the output of sed")
            text = "".join(line.replace(old, new, count) for line, count in zip(lines, places, strict=True))
        return text

    def _do_read(self, words: list[str]) -> bool:
        names, array = self._names_of_read(words[1:], "a")
        line = None
        if self._input is not None:
            line = self._input.pop(0) if self._input else ""
        if line is None or UNKNOWN.search(line):
            self.variables.doubtful.update([*names, *array])
            for name in names if not array else []:
                self.variables.assign(name, unknown(name) if line is None else line.rstrip("\n"))
            for name in array:
                self.variables.assign(name, _split(line.rstrip("\n"), self.variables.separators) if line else [])
            return False  # so that "while read" ends
        is_whole = line.endswith("\n")
        text = line.removesuffix("\n")
        if not any(re.match(r"-\w*r", word) for word in words[1:]):
            text = re.sub(r"\\(.)", r"\1", text)
        for name in array:
            self.variables.assign(name, _split(text, self.variables.separators))
        self._assign_words(names if not array else [], text)
        return is_whole

    def _assign_words(self, names: Sequence[str], text: str) -> None:
        """Give the words of a line to variables; the rest of the line to the last one."""
        separators = self.variables.separators
        blanks = "".join(char for char in separators if char.isspace())
        for name in names[:-1]:
            text = text.lstrip(blanks) if blanks else text
            end = re.search(f"[{re.escape(separators)}]", text) if separators else None
            word, text = (text[: end.start()], text[end.start() :]) if end else (text, "")
            self.variables.assign(name, word)
            text = text.lstrip(blanks) if blanks else text
            if text and text[0] in separators and text[0] not in blanks:
                text = text[1:]
        for name in names[-1:]:
            self.variables.assign(name, text.strip(blanks) if blanks else text)

    def _names_of_read(self, words: Sequence[str], array: str) -> tuple[list[str], list[str]]:
        """The names of variables, and of arrays, among the arguments of read."""
        names = list[str]()
        arrays = list[str]()
        takes = ""
        for word in words:
            if takes:
                (arrays if takes == array else []).append(word)
                takes = ""
            elif match := re.fullmatch(r"-\w*?([adinNptu])(.*)", word):
                takes = "" if match[2] else match[1]
            elif not word.startswith("-"):
                names.append(word)
        return names or ([] if arrays else ["REPLY"]), arrays

    def _do_mapfile(self, words: list[str]) -> bool:
        name = words[-1] if len(words) > 1 and words[-1].isidentifier() else "MAPFILE"
        lines = self._input
        self._input = None if self._input is None else []
        if lines is None or any(map(UNKNOWN.search, lines)):
            self.variables.doubtful.add(name)
            self.variables.values.pop(name, None)
            return True
        is_cut = any(re.match(r"-\w*t", word) for word in words[1:])
        self.variables.assign(name, [line.removesuffix("\n") if is_cut else line for line in lines])
        return True

    def _do_getopts(self, words: list[str]) -> bool | None:
        """Read the next option of the arguments into a variable; OPTIND and OPTARG are set."""
        if len(words) < 3:
            return None
        accepted = words[1]
        name = words[2]
        arguments = words[3:] or self.variables.arguments
        number = str(self.variables.values.get("OPTIND", "1"))
        offset = self._option_place[1] if self._option_place[0] == number else 0
        position = int(number) - 1 if number.isdigit() else 0
        word = arguments[position] if position < len(arguments) else ""
        if offset == 0 and (word == "--" or not re.match("-.", word)):
            self._end_option(position + (word == "--"), 0)
            self.variables.assign(name, "?")
            return False
        offset = max(offset, 1)
        letter = word[offset]
        remainder = word[offset + 1 :]
        match = re.search(f"{re.escape(letter)}(:?)", accepted.lstrip(":")) if letter != ":" else None
        self.variables.values.pop("OPTARG", None)
        self.variables.skipped.add("OPTARG")  # not set, and thus empty, without an argument
        if match is None or not match[1]:
            self._end_option(position if remainder else position + 1, offset + 1 if remainder else 0)
            if match is None and accepted.startswith(":"):
                self.variables.assign("OPTARG", letter)
            self.variables.assign(name, letter if match else "?")
        elif remainder or position + 1 < len(arguments):
            self._end_option(position + (1 if remainder else 2), 0)
            self.variables.assign("OPTARG", remainder or arguments[position + 1])
            self.variables.assign(name, letter)
        else:
            self._end_option(position + 1, 0)
            if accepted.startswith(":"):
                self.variables.assign("OPTARG", letter)
            self.variables.assign(name, ":" if accepted.startswith(":") else "?")
        return True

    def _end_option(self, position: int, offset: int) -> None:
        self._option_place = str(position + 1), offset
        self.variables.assign("OPTIND", str(position + 1))

    def _do_return(self, words: list[str]) -> bool:
        default = self.variables.status if words[0] in ("return", "exit") else 1
        raise Jump(words[0], int(words[1]) if len(words) > 1 and words[1].isdigit() else default)

    def _declare(self, words: list[str]) -> bool:
        """Follow export, declare, local and readonly."""
        options = "".join(word[1:] for word in words[1:] if re.fullmatch("-[a-zA-Z]+", word))
        is_local = bool(self._locals) and words[0] in ("local", "declare", "typeset") and "g" not in options
        for word in words[1:]:
            names = [word] if ASSIGNMENT.match(word) else self.variables.fields(word)
            for written in names:
                if name := re.match(r"[A-Za-z_]\w*", written):
                    self._declare_name(name[0], options, is_local=is_local, is_bare="=" not in written)
                    self._declare_value(written, name[0], options, is_written=ASSIGNMENT.match(word) is not None)
                    if words[0] == "export" or "x" in options:
                        self.variables.exported.add(name[0])
        return True

    def _declare_name(self, name: str, options: str, *, is_local: bool, is_bare: bool) -> None:
        self.variables.references.pop(name, None)
        if is_local and name not in self._locals[-1]:
            self._locals[-1][name] = self.variables.values.get(name)
            if is_bare and not set(options) & set("fFp"):
                self.variables.values.pop(name, None)
        if "i" in options:
            self.variables.integers.add(name)

    def _declare_value(self, word: str, name: str, options: str, *, is_written: bool) -> None:
        """Follow the assignment in a word of declare; ``is_written``: the script writes it without quotes around it."""
        is_map = "A" in options
        if "n" in options and "=" in word:
            self.variables.references[name] = self.variables.text(word.partition("=")[2])
        elif is_written:
            assign_word(self.variables, word, str(self._script), is_map=is_map)
        elif "=" in word:
            value = word[len(name) :].removeprefix("+").removeprefix("=")
            assign_text(self.variables, name, value, adds=word[len(name)] == "+")
        elif is_map and name not in self.variables.values:
            self.variables.assign(name, {})


def _split(text: str, separators: str) -> list[str]:
    into = Fields(separators)
    into.unquoted(text)
    into.flush()
    return into.done
