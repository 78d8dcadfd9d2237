"""Translation of flags of Megatron-LM and its forks into this project's flags, with messages for unusable flags."""

import ast
import shlex
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from megatron_core.config.flags import Group, Spellings, Translation, plain, to_flag
from megatron_core.config.run import aliases
from megatron_core.features.megatron_flags import tables

MOST_REPEATS = 10_000
"""Maximum length of a list, and maximum factor, in an expression such as [1]*24; models have far fewer layers."""
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


class MegatronSpellings(Spellings):
    """The flags of ``tables.yaml``."""

    names = (*tables.FLAGS, *tables.SAME_AS)

    def replace(self, groups: list[Group]) -> list[Group]:
        """Replace flags of Megatron-DeepSpeed that mean the same as others in this command line.

        Numbers of tokens become numbers of samples; a training ends at the first of ``--train-tokens`` and
        ``--train-samples`` or ``--train-iters``, and schedules follow tokens if both are given. ``--num-experts 1`` is
        a dense layer. ``--embed-layernorm`` precedes learned positions there, so that it is ``--embedding-layernorm``
        for other positions alone.
        """
        values_by_name = {plain(flag): values for flag, values in groups}
        length = _integer(values_by_name.get("seq_length"))
        samples = _integer(values_by_name.get("train_samples"))
        positions = values_by_name.get("position_embedding_type", ["learned_absolute"])[0]
        replaced: dict[str, list[str]] = {}
        for name, other in TOKENS.items():
            tokens = _integer(values_by_name.get(name))
            if tokens is not None and length:
                count = tokens // length
                replaced[name] = [str(count if other != "train_samples" or samples is None else min(count, samples))]
        left_out = {TOKENS[name] for name in replaced}
        steps = _integer(values_by_name.get("train_iters"))
        batch = _integer(values_by_name.get("global_batch_size"))
        if "train_tokens" in replaced and steps and batch and steps * batch >= int(replaced["train_tokens"][0]):
            left_out.add("train_iters")
        if values_by_name.get("num_experts") == ["1"] and "moe_router_topk" not in values_by_name:
            left_out |= OF_EXPERTS
        result: list[Group] = []
        for flag, values in groups:
            name = plain(flag)
            if name in replaced:
                result.append((to_flag(TOKENS[name]), replaced[name]))
            elif name == "embed_layernorm" and not values and positions in ("alibi", "rotary", "rope", "none"):
                result.append(("--embedding-layernorm", values))
            elif name not in left_out:
                result.append((flag, values))
        return result

    @cached_property
    def effective(self) -> set[str]:
        """The names of the flags of the command line that change something."""
        return {
            name
            for flag, values in self.groups
            if values != list(tables.ONLY_VALUE.get(name := plain(flag), ["-"])[:1])
        }

    def has(self, setting: str) -> bool:
        """Whether the command line gives a setting, by any of its names."""
        return setting in {aliases().get(name, name) for name in self.effective}

    def read(self, flag: str, values: list[str], line: Translation) -> Iterable[Group]:
        """Translate names and values of Megatron-LM; flags that it does not have are left to others."""
        name = plain(flag)
        other = tables.UNREAD_WITH.get(name)
        meaning = tables.VALUE_MEANS.get(f"{name}={' '.join(values)}")
        if meaning is not None:
            line.weak += tables.OVERRIDDEN_BY_FLAG.get(f"{name}={values[0]}", ())
            line.strong += meaning
            return []
        if other is not None and self.has(other):
            line.ignored[flag] = f"no effect with {to_flag(other)}"
            return []
        if name in tables.UNREAD_WITHOUT and not any(map(self.has, tables.UNREAD_WITHOUT[name])):
            line.ignored[flag] = "Megatron-LM reads it only for a checkpoint of ModelOpt in --load, or with a teacher"
            return []
        if name in line.known or name in aliases():
            line.weak += tables.OVERRIDDEN_BY_FLAG.get(name, ())
            return self._values(flag, aliases().get(name, name), values, line)
        if line.has(name):
            return [(flag, values)]
        if name in tables.SAME_AS:
            line.add_switch(flag, tables.SAME_AS[name], values)
            return []
        if name in tables.OVERRIDDEN_BY_FLAG:
            line.weak += tables.OVERRIDDEN_BY_FLAG[name]
            line.add_switch(flag, [], values)
            return []
        return self._other(flag, name, values, line)

    def entry(self, name: str, value: Any) -> tuple[str, Any]:
        """Translate a value of Megatron-LM."""
        return name, tables.SAME_VALUE.get(name, {}).get(value, value) if isinstance(value, str) else value

    def explain(self, name: str) -> tuple[str, str] | None:
        """Reason for a flag of Megatron-LM that is not a setting; for one of other programs the flag to give."""
        flag = tables.FLAGS.get(name)
        ours = tables.OF_OTHER_PROGRAMS.get(name)
        if flag is not None:
            return "Megatron-LM's", (
                f"it belongs to {flag.reason}; remove it" if flag.fate == "dependent" else flag.reason
            )
        return None if ours is None else ("another program's", f"give {ours}")

    def _values(self, flag: str, setting: str, values: list[str], line: Translation) -> list[Group]:
        """The groups of a flag of a setting, with Megatron-LM's values translated."""
        left_out = tables.LEFT_OUT.get(setting, ())
        if absent := [value for value in values if value in left_out]:
            line.ignored[" ".join([flag, *absent])] = "these parts run without it, with equal results"
            values = [value for value in values if value not in left_out]
        same = tables.SAME_VALUE.get(setting, {})
        values = [same.get(value, value) for value in values]
        if setting in tables.LISTS:
            values = _numbers(values)
        if len(values) > 1 and setting in tables.FURTHER_VALUES:
            return [(to_flag(tables.FURTHER_VALUES[setting]), values[1:]), (flag, values[:1])]
        return [(flag, values)]

    def _other(self, flag: str, name: str, values: list[str], line: Translation) -> list[Group]:
        """Handle a flag that is not a setting of this project."""
        entry = tables.FLAGS.get(name)
        only = tables.ONLY_VALUE.get(name, ())
        needed = tables.TOGETHER.get(name, tables.TOGETHER.get(f"{name}={' '.join(values)}"))
        words = " ".join([flag, *values])
        if entry is None:
            return [(flag, values)]
        if values and not entry.takes_values and entry.fate != "refused":
            line.add_switch(flag, [], values)
        elif needed is not None and not self.has(needed):
            line.faults.append(f"{words}: this needs {to_flag(needed)}")
        elif only and set(values) <= set(only):
            line.ignored[words] = "this is done in any case"
        elif entry.fate == "accepted":
            line.ignored[flag] = entry.reason
        elif entry.fate == "refused":
            reason = entry.reason
            if len(values) == 1:
                reason = reason.replace("--from-json FILE", f"--from-json {shlex.quote(values[0])}")
            line.faults.append(f"{words}: {reason}")
        elif entry.reason not in self.effective:
            line.ignored[flag] = f"no effect without {to_flag(entry.reason)}"
        elif entry.reason in line.known:
            line.faults.append(f"{words}: not supported with {to_flag(entry.reason)}; remove it")
        return []


def _integer(values: list[str] | None) -> int | None:
    """The only value of a flag if it is an integer."""
    if values is None or len(values) != 1 or len(values[0]) >= 20:
        return None
    return int(values[0]) if values[0].isascii() and values[0].isdigit() else None


def _numbers(values: list[str]) -> list[str]:
    """Evaluate a list that is written as an expression, as in Megatron-LM; other values are returned unchanged."""
    if len(values) != 1:
        return values
    try:
        result = _value_of(ast.parse(values[0], mode="eval").body)
    except (ValueError, OverflowError, SyntaxError, RecursionError, TypeError):
        return values
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
