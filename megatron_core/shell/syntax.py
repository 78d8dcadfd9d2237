"""Syntax of shell scripts: from words and operators to a tree of commands."""

from dataclasses import dataclass, field

from megatron_core.errors import ConfigError
from megatron_core.shell import tree
from megatron_core.shell.tokens import REDIRECTIONS, Token, tokens

_ENDS = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&"})
DEEPEST = 100
"""Maximum nesting of commands."""


def parse_script(text: str, name: str) -> tree.CommandList:
    """The commands of a script; ``name`` is its name in messages. ``ConfigError`` if its syntax is not understood."""
    return _Parser(list(tokens(text, name)), name).block(frozenset())


@dataclass(frozen=True)
class _Redirection:
    document: tree.Document | None = None
    is_silent: bool = False
    file: str | None = None
    appends: bool = False


@dataclass
class _Parser:
    """A parser by recursive descent."""

    tokens: list[Token]
    name: str
    position: int = 0
    depth: int = field(default=0)

    def block(self, ends: frozenset[str]) -> tree.CommandList:
        """Commands up to a word in ``ends``, which is not consumed."""
        commands: list[tree.Node] = []
        self.depth += 1
        if self.depth > DEEPEST:
            raise self._fault("is nested too deeply")
        while True:
            while self._is(";", "\n", "&"):
                self.position += 1
            token = self._token
            if token is None or (token.text in ends and (token.is_word or token.text != "\n")):
                if token is None and ends:
                    raise self._fault(f"ends before {' or '.join(sorted(ends))}")
                break
            if token.text in _ENDS:
                raise self._fault(f"has an unexpected {token.text}")
            node = self._chain()
            commands.append(tree.Subshell(node, may_exit=False) if self._is("&") else node)
        self.depth -= 1
        return tree.CommandList(tuple(commands))

    @property
    def _token(self) -> Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def _is(self, *texts: str) -> bool:
        token = self._token
        return token is not None and token.text in texts

    def _fault(self, what: str) -> ConfigError:
        token = self.tokens[min(self.position, len(self.tokens) - 1)] if self.tokens else Token("", 1, True)
        return ConfigError(f"{self.name} line {token.line} {what}; only bash scripts can be read")

    def _take(self, *texts: str) -> Token:
        """The next token, which must be one of ``texts`` if there are any."""
        token = self._token
        if token is None or (texts and token.text not in texts):
            raise self._fault(f"has no {' or '.join(texts) or 'word'}")
        self.position += 1
        return token

    def _skip_lines(self) -> None:
        while self._is("\n"):
            self.position += 1

    def _chain(self) -> tree.Node:
        links = [("&&", self._pipe())]
        while self._is("&&", "||"):
            operator = self._take().text
            self._skip_lines()
            links.append((operator, self._pipe()))
        return links[0][1] if len(links) == 1 else tree.Chain(tuple(links))

    def _pipe(self) -> tree.Node:
        negated = self._is("!")
        while self._is("!", "time"):
            self.position += 1
        stages = [self._command()]
        while self._is("|"):
            self.position += 1
            if self._is("&"):
                self.position += 1
            self._skip_lines()
            stages.append(self._command())
        return stages[0] if len(stages) == 1 and not negated else tree.Pipe(tuple(stages), negated)

    def _command(self) -> tree.Node:
        token = self._take()
        if not token.is_word and token.text not in ("(", "((", *REDIRECTIONS):
            raise self._fault(f"has an unexpected {token.text!r}")
        compound = {
            "if": self._if, "for": self._for, "select": self._for, "while": self._while, "until": self._while,
            "case": self._case, "{": self._group, "(": self._group, "((": self._expression,
            "function": self._function, "[[": self._test,
        }.get(token.text)  # fmt: skip
        if compound is None:
            following = [following_token.text for following_token in self.tokens[self.position : self.position + 2]]
            if token.is_word and following == ["(", ")"]:
                self.position += 2
                return self._body_of(token.text)
            self.position -= 1
            return self._simple()
        return self._redirected(compound(token))

    def _redirected(self, node: tree.Node) -> tree.Node:
        """``node`` with the redirections that follow it."""
        redirections = []
        while self._token is not None and self._token.text in REDIRECTIONS:
            redirections.append(self._redirection())
        return _with_redirections(node, redirections)

    def _redirection(self) -> _Redirection:
        """Skip an operator with its file."""
        token = self._take()
        if token.text == "<<":
            return _Redirection(tree.Document(token.document, "literal" if token.is_literal else "document"))
        name = self._take().text
        descriptor = token.document
        if token.text == "<<<":
            return _Redirection(tree.Document(name, "word"))
        if token.text == "<" and name.startswith("<("):
            return _Redirection(tree.Document(name[2:-1], "command"))
        is_output = token.text[0] in ">&" and descriptor in ("", "1")
        is_silent = is_output and not (token.text == ">&" and name in ("1", "&1"))
        return _Redirection(None, is_silent, name if is_silent and token.text in _WRITING else None, token.text == ">>")

    def _simple(self) -> tree.Node:
        words = list[str]()
        redirections = []
        line = self.tokens[self.position].line
        while (token := self._token) is not None:
            if token.is_word:
                words.append(token.text)
                self.position += 1
            elif token.text in REDIRECTIONS:
                redirections.append(self._redirection())
            else:
                break
        return _with_redirections(tree.Simple(tuple(words), line), redirections)

    def _if(self, first: Token) -> tree.If:
        branches = []
        otherwise = tree.CommandList()
        while True:
            condition = self.block(frozenset({"then"}))
            self._take("then")
            branches.append((condition, self.block(frozenset({"elif", "else", "fi"}))))
            word = self._take("elif", "else", "fi").text
            if word == "else":
                otherwise = self.block(frozenset({"fi"}))
                word = self._take("fi").text
            if word == "fi":
                return tree.If(tuple(branches), otherwise, first.line)

    def _for(self, first: Token) -> tree.Node:
        if self._is("(("):
            return self._counting_loop(first)
        name = self._take().text
        words = ['"$@"']
        self._skip_lines()
        if self._is("in"):
            self.position = self.position + 1
            words = []
            while self._token is not None and self._token.is_word:
                words.append(self._take().text)
        return tree.For(name, tuple(words), self._loop_body(), first.line)

    def _counting_loop(self, first: Token) -> tree.Node:
        """``for ((i = 0; i < n; i++))``."""
        begin, condition, step = (*self._take("((").document.split(";"), "", "")[:3]
        body = self._loop_body()
        inner = tree.CommandList((*body.commands, tree.Arithmetic(step, first.line)))
        loop = tree.While(tree.CommandList((tree.Arithmetic(condition or "1", first.line),)), inner, False, first.line)
        return tree.CommandList((tree.Arithmetic(begin, first.line), loop))

    def _expression(self, first: Token) -> tree.Arithmetic:
        return tree.Arithmetic(first.document, first.line)

    def _loop_body(self) -> tree.CommandList:
        while self._is(";", "\n"):
            self.position += 1
        self._take("do")
        body = self.block(frozenset({"done"}))
        self._take("done")
        return body

    def _while(self, first: Token) -> tree.While:
        condition = self.block(frozenset({"do"}))
        return tree.While(condition, self._loop_body(), first.text == "until", first.line)

    def _case(self, first: Token) -> tree.Case:
        word = self._take().text
        branches = []
        self._skip_lines()
        self._take("in")
        self._skip_lines()
        while not self._is("esac"):
            patterns = []
            while not self._is(")"):
                token = self._take()
                patterns += [token.text] if token.is_word else []
            self.position += 1
            body = self.block(frozenset({";;", ";&", ";;&", "esac"}))
            end = self._take().text if self._is(";;", ";&", ";;&") else ";;"
            branches.append((tuple(patterns), body, end))
            self._skip_lines()
        self._take("esac")
        return tree.Case(word, tuple(branches), first.line)

    def _group(self, first: Token) -> tree.Node:
        end = "}" if first.text == "{" else ")"
        body = self.block(frozenset({end}))
        self._take(end)
        return body if end == "}" else tree.Subshell(body)

    def _function(self, first: Token) -> tree.Function:
        name = self._take().text
        while self._is("(", ")"):
            self.position += 1
        return self._body_of(name)

    def _body_of(self, name: str) -> tree.Function:
        self._skip_lines()
        body = self._command()
        return tree.Function(name, body if isinstance(body, tree.CommandList) else tree.CommandList((body,)))

    def _test(self, first: Token) -> tree.Test:
        words = []
        while not self._is("]]"):
            token = self._take()
            words += [token.text] if token.text != "\n" else []
        self.position += 1
        return tree.Test(tuple(words), first.line)


_WRITING = (">", ">>", ">|")


def _with_redirections(node: tree.Node, redirections: list[_Redirection]) -> tree.Node:
    documents = [redirection.document for redirection in redirections if redirection.document is not None]
    outputs = [redirection for redirection in redirections if redirection.is_silent]
    if not (documents or outputs):
        return node
    output = outputs[-1] if outputs else _Redirection()
    return tree.Redirected(node, documents[-1] if documents else None, output.is_silent, output.file, output.appends)
