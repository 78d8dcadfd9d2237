"""Syntax of shell scripts: from text to tokens and from tokens to a tree of commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_core.errors import ConfigError, shortened
from megatron_core.shell.tree import (
    Arithmetic,
    Block,
    Case,
    Chain,
    For,
    Function,
    If,
    Node,
    Pipe,
    Simple,
    Test,
    While,
)

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_OPERATORS = (";;&", "&&", "||", ";;", ";&", "<<<", "<<-", "<<", ">>", "<&", ">&", "&>", "<>", ">|", *";|&()<>\n")
_REDIRECTIONS = {"<<<", "<<-", "<<", ">>", "<&", ">&", "&>", "<>", ">|", "<", ">"}
_PAIRS = {"$(": ")", "${": "}", "$[": "]", "(": ")", "<(": ")", ">(": ")"}
_ENDS = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&"})
DEEPEST = 100
"""Maximum nesting of commands."""


@dataclass(frozen=True)
class Token:
    """A word with its quotes, or an operator."""

    text: str
    line: int
    is_word: bool
    document: str = ""
    """Text of a here-document, for the operator ``<<``."""


def parse(text: str, name: str) -> Block:
    """The commands of a script; ``name`` is its name in messages. ``ConfigError`` if its syntax is not understood."""
    return _Parser(list(tokens(text, name)), name).block(frozenset())


def end_of(text: str, at: int) -> int:
    """Index behind the quotation, expansion or character at ``at``; ``ValueError`` if its end is missing."""
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] == "'" or text.startswith("$'", at):
        start = at + (2 if text[at] == "$" else 1)
        return text.index("'", start) + 1
    if text[at] in '"`':
        inner = at + 1
        while text[inner : inner + 1] != text[at]:
            if inner >= len(text):
                raise ValueError
            is_part = text[inner] in "\\$`" if text[at] == '"' else text[inner] == "\\"
            inner = end_of(text, inner) if is_part else inner + 1
        return inner + 1
    for opening, end in _PAIRS.items():
        if text.startswith(opening, at):
            inner = at + len(opening)
            while text[inner : inner + 1] != end:
                if inner >= len(text):
                    raise ValueError
                is_part = text[inner] in "\\'\"`$" or (text[inner] == "(" and end == ")")
                inner = end_of(text, inner) if is_part else inner + 1
            return inner + 1
    return at + 1


def tokens(text: str, name: str) -> Iterator[Token]:
    """Words and operators; comments and joined lines are left out."""
    at, line, waiting = 0, 1, []
    while at < len(text):
        if text[at] in " \t\r" or text.startswith(("\\\n", "\\\r\n"), at):
            end = at + 1 if text[at] != "\\" else text.index("\n", at) + 1
        elif text[at] == "#":
            end = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif (operator := _operator(text, at)) is not None:
            end = at + len(operator)
            if operator in ("<<", "<<-"):
                document = re.compile(r"[ \t]*([^\s;|&<>]+)").match(text, end)
                end, word = (document.end(), document[1]) if document else (end, "")
                waiting.append((line, word.strip("'\"\\"), operator))
            elif operator == "\n" and waiting:
                for start, word, kind in waiting:
                    body, end = _document(text, end, word, kind)
                    yield Token("<<", start, False, body)
                waiting = []
                yield Token("\n", line, False)
            else:
                yield Token(operator, line, False)
        else:
            end = _word_end(text, at, line, name)
            word = text[at:end]
            if not (word.isdigit() and text.startswith(("<", ">"), end)):  # 2>&1
                yield Token(word if "'" in word else re.sub(r"\\\r?\n", "", word), line, True)
        line += text.count("\n", at, end)
        at = end


def _operator(text: str, at: int) -> str | None:
    if text.startswith(("<(", ">("), at):  # a word: the output of a command as a file
        return None
    return next((each for each in _OPERATORS if text.startswith(each, at)), None)


def _document(text: str, at: int, word: str, kind: str) -> tuple[str, int]:
    """The here-document that starts at ``at``, and the index behind its end."""
    lines = []
    while at < len(text):
        end = text.find("\n", at)
        line = text[at:] if end < 0 else text[at:end]
        at = len(text) if end < 0 else end + 1
        line = line.lstrip("\t") if kind == "<<-" else line
        if line.rstrip("\r") == word:
            break
        lines.append(line)
    return "\n".join(lines), at


def _word_end(text: str, start: int, line: int, name: str) -> int:
    at = start
    try:
        while at < len(text):
            if text[at] == "(" and ASSIGNMENT.fullmatch(text, start, at):
                at = _array_end(text, at + 1)
            elif text.startswith(("<(", ">("), at) or text[at] not in " \t\r\n;|&()<>":
                at = end_of(text, at)
            else:
                break
    except ValueError:
        shown = shortened(text[start:].split("\n")[0], 60)
        raise ConfigError(f"{name} line {line}: the end of the quotation or bracket in {shown} is missing") from None
    return at


def _array_end(text: str, at: int) -> int:
    while text[at : at + 1] != ")":
        if at >= len(text):
            raise ValueError
        is_comment = text[at] == "#" and text[at - 1] in " \t\n("
        at = text.index("\n", at) if is_comment else end_of(text, at) if text[at] in "\\'\"`$(" else at + 1
    return at + 1


@dataclass
class _Parser:
    """A parser by recursive descent."""

    tokens: list[Token]
    name: str
    at: int = 0
    depth: int = field(default=0)

    def block(self, ends: frozenset[str]) -> Block:
        """Commands up to a word in ``ends``, which is not consumed."""
        found: list[Node] = []
        self.depth += 1
        if self.depth > DEEPEST:
            raise self._fault("is nested too deeply")
        while True:
            while self._is(";", "\n", "&"):
                self.at += 1
            token = self._token
            if token is None or (token.text in ends and (token.is_word or token.text != "\n")):
                if token is None and ends:
                    raise self._fault(f"ends before {' or '.join(sorted(ends))}")
                break
            if token.text in _ENDS:
                raise self._fault(f"has an unexpected {token.text}")
            found.append(self._chain())
        self.depth -= 1
        return Block(tuple(found))

    @property
    def _token(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _is(self, *texts: str) -> bool:
        token = self._token
        return token is not None and token.text in texts

    def _fault(self, what: str) -> ConfigError:
        token = self.tokens[min(self.at, len(self.tokens) - 1)] if self.tokens else Token("", 1, True)
        return ConfigError(f"{self.name} line {token.line} {what}; only bash scripts can be read")

    def _take(self, *texts: str) -> Token:
        """The next token, which must be one of ``texts`` if there are any."""
        token = self._token
        if token is None or (texts and token.text not in texts):
            raise self._fault(f"has no {' or '.join(texts) or 'word'}")
        self.at += 1
        return token

    def _skip_lines(self) -> None:
        while self._is("\n"):
            self.at += 1

    def _chain(self) -> Node:
        parts = [("&&", self._pipe())]
        while self._is("&&", "||"):
            operator = self._take().text
            self._skip_lines()
            parts.append((operator, self._pipe()))
        return parts[0][1] if len(parts) == 1 else Chain(tuple(parts))

    def _pipe(self) -> Node:
        negated = self._is("!")
        while self._is("!", "time"):
            self.at += 1
        parts = [self._command()]
        while self._is("|"):
            self.at += 1
            if self._is("&"):
                self.at += 1
            self._skip_lines()
            parts.append(self._command())
        return parts[0] if len(parts) == 1 and not negated else Pipe(tuple(parts), negated)

    def _command(self) -> Node:
        token = self._take()
        if not token.is_word and token.text not in ("(", *_REDIRECTIONS):
            raise self._fault(f"has an unexpected {token.text!r}")
        compound = {
            "if": self._if, "for": self._for, "select": self._for, "while": self._while, "until": self._while,
            "case": self._case, "{": self._group, "(": self._group, "function": self._function, "[[": self._test,
        }.get(token.text)  # fmt: skip
        if compound is None:
            if (
                token.is_word
                and self._is("(")
                and self.at + 1 < len(self.tokens)
                and self.tokens[self.at + 1].text == ")"
            ):
                self.at += 2
                return self._body_of(token.text)
            self.at -= 1
            return self._simple()
        found = compound(token)
        while self._token is not None and self._token.text in _REDIRECTIONS:
            self._redirection()
        return found

    def _redirection(self) -> str:
        """Skip an operator with its file; the text of a here-document."""
        token = self._take()
        if token.text != "<<":
            self._take()
        return token.document

    def _simple(self) -> Simple:
        words, document, line = [], "", self.tokens[self.at].line
        while (token := self._token) is not None:
            if token.is_word:
                words.append(token.text)
                self.at += 1
            elif token.text in _REDIRECTIONS:
                document = self._redirection() or document
            else:
                break
        return Simple(tuple(words), line, document)

    def _if(self, first: Token) -> If:
        branches, otherwise = [], Block()
        while True:
            condition = self.block(frozenset({"then"}))
            self._take("then")
            branches.append((condition, self.block(frozenset({"elif", "else", "fi"}))))
            word = self._take("elif", "else", "fi").text
            if word == "else":
                otherwise = self.block(frozenset({"fi"}))
                word = self._take("fi").text
            if word == "fi":
                return If(tuple(branches), otherwise, first.line)

    def _for(self, first: Token) -> Node:
        if self._is("("):
            return self._counting_loop(first)
        name, words = self._take().text, ['"$@"']
        self._skip_lines()
        if self._is("in"):
            self.at, words = self.at + 1, []
            while self._token is not None and self._token.is_word:
                words.append(self._take().text)
        return For(name, tuple(words), self._loop_body(), first.line)

    def _counting_loop(self, first: Token) -> Node:
        """``for ((i = 0; i < n; i++))``."""
        text = self._until_double(")", "(")
        begin, condition, step = (*text.split(";"), "", "")[:3]
        body = self._loop_body()
        inner = Block((*body.commands, Arithmetic(step, first.line)))
        loop = While(Block((Arithmetic(condition or "1", first.line),)), inner, False, first.line)
        return Block((Arithmetic(begin, first.line), loop))

    def _until_double(self, end: str, start: str) -> str:
        """The text of ``(( text ))``, whose first parenthesis is the next token."""
        self._take(start)
        if self._is(start):
            self.at += 1
        words, depth = [], 0
        while not (depth == 0 and self._is(end)):
            token = self._take()
            depth += (token.text == start) - (token.text == end)
            words.append(token.text)
        while self._is(end):
            self.at += 1
        return " ".join(words)

    def _loop_body(self) -> Block:
        while self._is(";", "\n"):
            self.at += 1
        self._take("do")
        body = self.block(frozenset({"done"}))
        self._take("done")
        return body

    def _while(self, first: Token) -> While:
        condition = self.block(frozenset({"do"}))
        return While(condition, self._loop_body(), first.text == "until", first.line)

    def _case(self, first: Token) -> Case:
        word, branches = self._take().text, []
        self._skip_lines()
        self._take("in")
        self._skip_lines()
        while not self._is("esac"):
            patterns = []
            while not self._is(")"):
                token = self._take()
                patterns += [token.text] if token.is_word else []
            self.at += 1
            branches.append((tuple(patterns), self.block(frozenset({";;", ";&", ";;&", "esac"}))))
            while self._is(";;", ";&", ";;&", "\n"):
                self.at += 1
        self._take("esac")
        return Case(word, tuple(branches), first.line)

    def _group(self, first: Token) -> Node:
        if first.text == "(" and self._is("("):
            return Arithmetic(self._until_double(")", "("), first.line)
        end = "}" if first.text == "{" else ")"
        body = self.block(frozenset({end}))
        self._take(end)
        return body

    def _function(self, first: Token) -> Function:
        name = self._take().text
        while self._is("(", ")"):
            self.at += 1
        return self._body_of(name)

    def _body_of(self, name: str) -> Function:
        self._skip_lines()
        body = self._command()
        return Function(name, body if isinstance(body, Block) else Block((body,)))

    def _test(self, first: Token) -> Test:
        words = []
        while not self._is("]]"):
            token = self._take()
            words += [token.text] if token.text != "\n" else []
        self.at += 1
        return Test(tuple(words), first.line)
