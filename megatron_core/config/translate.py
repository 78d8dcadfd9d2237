"""Translation of a command line for Megatron-LM into this project's flags, with messages for unusable flags."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_core.config import megatron_flags
from megatron_core.config.file import convert, describe, perhaps
from megatron_core.config.heterogeneous import LAYERS_FILE, LAYERS_JSON, compact_json, read_layers_file
from megatron_core.config.hybrid import STAGE, read_pattern
from megatron_core.config.trainer_flags import SAME_MEANING
from megatron_core.errors import ConfigError, shortened
from megatron_core.feature import shorthands

MOST_REPEATS = 10_000
"""Maximum length of a list, and maximum factor, in an expression such as [1]*24; models have far fewer layers."""


def command_line() -> dict[str, type]:
    """The flags of every command line that name the source of settings, and their types."""
    return {"config": str, "model_preset": str, "depth": int} | dict.fromkeys(shorthands(), str)


@dataclass
class Translation:
    """A command line in this project's flags."""

    known: Mapping[str, Any]
    """The settings and their types."""
    weak: list[str] = field(default_factory=list)
    """Flags that the flags in ``strong`` override."""
    strong: list[str] = field(default_factory=list)
    """The other flags, in their order."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Flags without effect, and the reason."""
    faults: list[str] = field(default_factory=list)
    """A message for each flag that cannot be used."""
    unknown: list[str] = field(default_factory=list)
    """Flags of neither project, and words that belong to no flag; each has a message in ``faults``, too."""

    @property
    def flags(self) -> list[str]:
        """All flags that can be used."""
        return self.weak + self.strong

    @classmethod
    def of(cls, given: list[str], known: Mapping[str, Any]) -> Translation:
        """Translate ``given``; ``known`` has the type of each setting."""
        found = cls(known)
        for _, one in cls.each(given, known):
            found.weak += one.weak
            found.strong += one.strong
            found.ignored |= one.ignored
            found.faults += one.faults
            found.unknown += one.unknown
        return found

    @classmethod
    def each(cls, given: list[str], known: Mapping[str, Any]) -> Iterator[tuple[list[str], Translation]]:
        """Each flag of ``given`` with its values, and its translation."""
        groups = _with_implied(_of_megatron_deepspeed(grouped(given)))
        effective = {
            name
            for flag, values in groups
            if values != list(megatron_flags.ONLY_VALUE.get(name := plain(flag), ["-"])[:1])
        }
        for flag, values in groups:
            found = cls(known)
            found._add(flag, plain(flag), values, effective)
            yield [flag, *values], found

    def _add(self, flag: str, name: str, values: list[str], effective: set[str]) -> None:
        """Translate one flag with its values; ``effective``: the names of all flags that change something."""
        if not flag.startswith("--"):
            self.unknown.append(flag)
            self.faults.append(f"{' '.join([flag, *values])}: this belongs to no flag; remove it")
        elif flag == "--":
            self.faults += [f"{value}: this belongs to no flag; remove it" for value in values]
        elif (meaning := megatron_flags.VALUE_MEANS.get(f"{name}={' '.join(values)}")) is not None:
            self.weak += megatron_flags.OVERRIDDEN_BY_FLAG.get(f"{name}={values[0]}", ())
            self.strong += meaning
        elif (other := megatron_flags.UNREAD_WITH.get(name)) in _own_names(effective):
            self.ignored[flag] = f"no effect with --{str(other).replace('_', '-')}"
        elif _is_pattern(name) and STAGE in "".join(values):  # the others are expanded
            self.faults.append(
                f"{flag} {values[0]}: --pipeline-model-parallel-layout also assigns layers to stages; remove it or the "
                f"{STAGE}"
            )
        elif name in (LAYERS_FILE, LAYERS_JSON):
            self._layers(flag, name, values)
        elif name in self.known:
            self.weak += megatron_flags.OVERRIDDEN_BY_FLAG.get(name, ())
            renamed = megatron_flags.SAME_VALUE.get(name, {})
            values = [renamed.get(value, value) for value in values]
            values = self._without_parts(flag, name, values)
            if len(values) > 1 and name in megatron_flags.FURTHER_VALUES:
                other = megatron_flags.FURTHER_VALUES[name]
                self._setting(f"--{other.replace('_', '-')}", other, values[1:])
                values = values[:1]
            self._setting(flag, name, values)
        elif f"no_{name}" in self.known:  # --load-optim overrides no_load_optim: true in the --config file
            self._switch(flag, [f"--no-no-{name.replace('_', '-')}"], values)
        elif self._is_switched_off(name):
            self._switch(flag, [flag], values)
        elif name in megatron_flags.SAME_AS:
            self._switch(flag, megatron_flags.SAME_AS[name], values)
        elif name in megatron_flags.RENAMED:
            self.weak += megatron_flags.OVERRIDDEN_BY_FLAG.get(name, ())
            own = megatron_flags.RENAMED[name]
            values = self._without_parts(flag, own, values)
            self._setting(f"--{own.replace('_', '-')}", own, values)
        elif name in megatron_flags.OVERRIDDEN_BY_FLAG:
            self.weak += megatron_flags.OVERRIDDEN_BY_FLAG[name]
            self._switch(flag, [], values)
        else:
            self._other(flag, name, values, effective)

    def _without_parts(self, flag: str, name: str, values: list[str]) -> list[str]:
        """``values`` without parts that do not exist here; a note names them."""
        parts = megatron_flags.LEFT_OUT.get(name, ())
        if absent := [value for value in values if value in parts]:
            self.ignored[" ".join([flag, *absent])] = "these parts run without it, with equal results"
        return [value for value in values if value not in parts]

    def _is_switched_off(self, name: str) -> bool:
        return any(name.startswith("no_" * count) and self.known.get(name[3 * count :]) is bool for count in (1, 2))

    def _setting(self, flag: str, name: str, values: list[str]) -> None:
        """Add a setting with its values, or a fault if they are not legal."""
        kind, single = self.known[name], values
        try:
            if kind is bool:
                self._switch(flag, [flag], values)
                return
            if "tuple[int" in str(kind) and len(values) == 1 and "[" not in values[0]:
                values = values[0].split()  # in quotes
            if name in megatron_flags.LISTS:
                values = _numbers(values)
            found = convert(values if _is_list(kind) else _one(values), kind)
            values = values if isinstance(found, tuple) else [str(found)]  # 1e3 for an integer
            if kind == str | None and values[0].startswith("-"):  # a pattern of layers
                flag, values = f"{flag}={values[0]}", []
        except (TypeError, ValueError, OverflowError, SyntaxError, RecursionError):
            many = len(single) > 1 and not _is_list(kind)
            legal = describe(kind, "None") + (", one value (in quotes if it has spaces)" if many else "")
            self.faults.append(f"{' '.join([flag, *single])}: this cannot be read; legal: {legal}")
        else:
            self.strong += [flag, *values]

    def _layers(self, flag: str, name: str, values: list[str]) -> None:
        """Add the JSON of layers with sizes of their own, or of a file with it."""
        try:
            text = read_layers_file(_one(values)) if name == LAYERS_FILE else compact_json(_one(values))
        except ConfigError as error:
            self.faults.append(str(error))
        except ValueError as error:
            self.faults.append(f"{flag} {shortened(' '.join(values))}: {shortened(str(error))}")
        else:
            self.strong.append(f"--{LAYERS_JSON.replace('_', '-')}={text}")

    def _switch(self, flag: str, meaning: list[str] | tuple[str, ...], values: list[str]) -> None:
        if values:
            remedy = "remove the value"
            if len(values) == 1 and values[0].lower() in OFF:
                remedy = f"to turn it off, give --no-{plain(flag).removeprefix('no_').replace('_', '-')}"
            self.faults.append(f"{flag} {' '.join(values)}: this is a switch; {remedy}")
        else:
            self.strong += meaning

    def _other(self, flag: str, name: str, values: list[str], effective: set[str]) -> None:
        """Handle a flag that is not a setting of this project."""
        entry, only = megatron_flags.FLAGS.get(name), megatron_flags.ONLY_VALUE.get(name, ())
        shown = " ".join([flag, *values])
        if entry is None:
            names = {*self.known, *megatron_flags.FLAGS, *megatron_flags.RENAMED, *megatron_flags.SAME_AS}
            theirs = SAME_MEANING.get(name)
            hint = perhaps(name, names, "--") if theirs is None else f"in place of transformers' flag, give {theirs}"
            self.unknown.append(flag)
            self.faults.append(f"{shown}: neither a flag of this project nor of Megatron-LM; {hint}")
        elif values and not entry.takes_values and entry.fate != "refused":
            self._switch(flag, [], values)
        elif (needed := _partner(name, values)) is not None and needed not in _own_names(effective):
            self.faults.append(f"{shown}: this needs --{needed.replace('_', '-')}")
        elif only and set(values) <= set(only):
            self.ignored[shown] = "this is done in any case"
        elif entry.fate == "accepted":
            self.ignored[flag] = entry.reason
        elif entry.fate == "refused":
            reason = entry.reason
            if len(values) == 1:
                reason = reason.replace("--from-json FILE", f"--from-json {shlex.quote(values[0])}")
            self.faults.append(f"{shown}: {reason}")
        elif entry.reason not in effective:
            self.ignored[flag] = f"no effect without --{entry.reason.replace('_', '-')}"
        elif entry.reason in self.known:
            self.faults.append(f"{shown}: not supported with --{entry.reason.replace('_', '-')}; remove it")


def _partner(name: str, values: list[str]) -> str | None:
    """The setting that has to be given with this flag."""
    together = megatron_flags.TOGETHER
    return together.get(name, together.get(f"{name}={' '.join(values)}"))


def _with_implied(groups: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Replace a pattern of layers by its letters and the flags that it implies, unless one of these is given too."""
    found, names = list[tuple[str, list[str]]](), {plain(flag) for flag, _ in groups}
    for flag, values in groups:
        if _is_pattern(plain(flag)) and len(values) == 1:
            letters, implied = read_pattern(values[0])
            counts = [each for flag, each in groups if plain(flag) == "mtp_num_layers"]
            agrees = "mtp_num_layers" not in implied or all(each == [str(implied["mtp_num_layers"])] for each in counts)
            if "pipeline_model_parallel_layout" not in implied.keys() & names and agrees:
                new = [(name, value) for name, value in implied.items() if name not in names]
                values = [letters]
                found += [(f"--{name.replace('_', '-')}", [] if value is True else [str(value)]) for name, value in new]
        found.append((flag, values))
    return found


OFF = ("false", "0", "no", "off")
"""Values that turn a switch off in other programs."""
TOKENS = {
    "train_tokens": "train_samples",
    "lr_decay_tokens": "lr_decay_samples",
    "lr_warmup_tokens": "lr_warmup_samples",
}
"""Megatron-DeepSpeed's flags in tokens -> those in samples."""
OF_EXPERTS = {
    *("num_experts", "moe_expert_parallel_size", "moe_loss_coeff", "moe_train_capacity_factor"),
    *("moe_eval_capacity_factor", "moe_min_capacity", "disable_moe_token_dropping"),
}
"""Megatron-DeepSpeed's flags of layers with experts."""


def _of_megatron_deepspeed(groups: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Replace flags of Megatron-DeepSpeed that mean the same as others in this command line.

    Numbers of tokens become numbers of samples; a training ends at the first of ``--train-tokens`` and
    ``--train-samples`` or ``--train-iters``, and schedules follow tokens if both are given. ``--num-experts 1`` is a
    dense layer. ``--embed-layernorm`` precedes learned positions there, so that it is ``--embedding-layernorm`` for
    other positions alone.
    """
    given = {plain(flag): values for flag, values in groups}
    length, samples = _integer(given.get("seq_length")), _integer(given.get("train_samples"))
    positions = given.get("position_embedding_type", ["learned_absolute"])[0]
    replaced: dict[str, list[str]] = {}
    for name, other in TOKENS.items():
        tokens = _integer(given.get(name))
        if tokens is not None and length:
            count = tokens // length
            replaced[name] = [str(count if other != "train_samples" or samples is None else min(count, samples))]
    left_out = {TOKENS[name] for name in replaced}
    steps, batch = _integer(given.get("train_iters")), _integer(given.get("global_batch_size"))
    if "train_tokens" in replaced and steps and batch and steps * batch >= int(replaced["train_tokens"][0]):
        left_out.add("train_iters")
    if given.get("num_experts") == ["1"] and "moe_router_topk" not in given:
        left_out |= OF_EXPERTS
    found = list[tuple[str, list[str]]]()
    for flag, values in groups:
        name = plain(flag)
        if name in replaced:
            found.append((f"--{TOKENS[name].replace('_', '-')}", replaced[name]))
        elif name == "embed_layernorm" and not values and positions in ("alibi", "rotary", "rope", "none"):
            found.append(("--embedding-layernorm", values))
        elif name not in left_out:
            found.append((flag, values))
    return found


def _integer(values: list[str] | None) -> int | None:
    """The only value of a flag if it is an integer."""
    is_one = values is not None and len(values) == 1 and values[0].isascii() and values[0].isdigit()
    return int(values[0]) if is_one and values is not None and len(values[0]) < 20 else None


def _is_pattern(name: str) -> bool:
    return megatron_flags.RENAMED.get(name, name) == "hybrid_layer_pattern"


def _own_names(flags: Iterable[str]) -> set[str]:
    return {megatron_flags.RENAMED.get(name, name) for name in flags}


def plain(flag: str) -> str:
    """A flag as a name: ``--data-path`` is ``data_path``."""
    return flag[2:].replace("-", "_")


def grouped(given: list[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values that follow it; ``--x=1`` is ``--x 1``, and quotes around values are removed."""
    groups: list[tuple[str, list[str]]] = []
    for token in given:
        if token.startswith("--") or not groups:
            flag, equals, value = token.partition("=")
            groups.append((flag, [_unquoted(value)] if equals else []))
        else:
            groups[-1][1].append(_unquoted(token))
    return groups


def _unquoted(value: str) -> str:
    """Remove the quotes around a value; scripts may quote quotes, so that the shell does not remove them."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _is_list(kind: Any) -> bool:
    """Whether a setting of this type takes several values."""
    return "tuple" in str(kind)


def _one(values: list[str]) -> str:
    """The only value."""
    (value,) = values
    return value


def _numbers(values: list[str]) -> list[str]:
    """Evaluate a list that is written as an expression, as in Megatron-LM; other values are returned unchanged."""
    if len(values) != 1:
        return values
    result = _value_of(ast.parse(values[0], mode="eval").body)
    return [str(number) for number in (result if isinstance(result, list) else [result])]


def _value_of(node: ast.expr) -> Any:
    """Evaluate an expression of numbers, lists, + and * to a number or a flat list."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value_of(left) + _value_of(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            value = _value_of(left)
            if times * (len(value) if isinstance(value, list) else 1) <= MOST_REPEATS:
                return value * times
    raise ValueError(ast.dump(node))
